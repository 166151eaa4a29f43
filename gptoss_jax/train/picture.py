"""loss.png from metrics.jsonl."""

import json
import pathlib

import numpy as np


def losses(metrics: str | pathlib.Path, image: str | pathlib.Path | None = None):
    """A matplotlib Figure of every step's loss, their running mean, and the held-out losses, saved
    as `image` if that is given. None, and no file, where metrics.jsonl has no loss yet."""
    from matplotlib.figure import Figure  # imported here: half a second that inference need not pay

    train, valid = [], []
    for line in pathlib.Path(metrics).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("loss") is not None:
            train.append((record["step"], record["loss"]))
        if "valid_loss" in record:
            valid.append((record["step"], record["valid_loss"]))
    if not train:
        return None
    steps, values = np.array(train, float).T
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, color="0.75", linewidth=0.8, label="training")
    width = max(1, len(values) // 50)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :], smooth, color="tab:blue", label="running mean")
    if valid:
        axes.plot(*np.array(valid, float).T, "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="cross entropy (nats a token)")
    if (values > 0).all() and values.max() > 5 * values.min():
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    if image is not None:
        figure.savefig(image, dpi=110)
    return figure
