"""A checkpoint's folder: which files belong to it, and whether they are all there."""

import dataclasses
import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..places import FOREIGN, WORKS
from .safetensors_file import LazyTensor, TensorFile, open_file

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_SHARD = re.compile(r"(.+?-)(\d+)(-of-)(\d+)\.safetensors")


@dataclasses.dataclass
class Files:
    """What lies in a checkpoint's folder. problems: what is wrong with it, one line each."""

    folder: Path
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: dict[str, LazyTensor] = dataclasses.field(default_factory=dict)
    files: list[TensorFile] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    total_size: Any = None  # bytes of all tensors, as the index has it

    @property
    def size_bytes(self) -> int:
        return sum(f.path.stat().st_size for f in self.files)


def read_json(path: Path) -> Any:
    """Raises ValueError for what is not JSON or cannot be read, FileNotFoundError for no file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait for a writer
            raise OSError(errno.EINVAL, "it is a folder, pipe or device")
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise
    except OSError as e:
        raise ValueError(f"{path.name} cannot be read: {e.strerror}.") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path.name} is no valid JSON ({e}).") from None


def open_folder(folder: Path) -> Files:
    """Opens every tensor file of a folder. Problems are collected, not raised."""
    files = Files(folder)
    try:
        files.config = read_json(folder / CONFIG)
        if not isinstance(files.config, dict):
            raise ValueError(f"{CONFIG} must hold a JSON object.")
    except FileNotFoundError:
        files.problems.append(f"{CONFIG} is missing.")
    except ValueError as e:
        files.problems.append(str(e))
        files.config = {}
    placed = _placed(files)
    for name in sorted(set(placed.values()) if isinstance(placed, dict) else placed):
        try:
            files.files.append(open_file(folder / name))
        except FileNotFoundError:
            files.problems.append(f"{name} is missing.")
        except OSError as e:
            files.problems.append(f"{name} cannot be read: {e.strerror}.")
        except CheckpointError as e:
            files.problems += [f"{name}: {p}" for p in e.problems]
    for file in files.files:
        for name, tensor in file.tensors.items():
            if name in files.tensors:
                files.problems.append(
                    f"{name} is in {files.tensors[name].file.path.name} and in {file.path.name}."
                )
            files.tensors.setdefault(name, tensor)
    if isinstance(placed, dict):
        _compare_with_index(files, placed)
    return files


def _placed(files: Files) -> dict[str, str] | list[str]:
    """{tensor: file} from the index, or a list of files where there is none."""
    folder = files.folder
    single, index = (os.path.lexists(folder / name) for name in (SINGLE, INDEX))
    if single and index:
        files.problems.append(f"both {SINGLE} and {INDEX} are here; remove the one that is stale.")
        return []
    if single:
        return [SINGLE]
    if index:
        return _read_index(files)
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if not shards or (folder / "adapter_config.json").exists():
        files.problems.append(_nothing(folder))
        return []
    matches = [_SHARD.fullmatch(name) for name in shards]
    if all(matches) and len({(m[1], m[4]) for m in matches}) == 1:
        return _complete(files, matches)
    if len(shards) > 1:
        files.problems.append(
            f"{INDEX} is missing, and {', '.join(shards[:4])} do not say which belong together."
        )
        return []
    return shards


def _complete(files: Files, matches: list[re.Match]) -> list[str]:
    """Shards without an index: all numbers must be there, from 0 or from 1 to the last."""
    numbers = {int(m[2]) for m in matches}
    last = int(matches[0][4])
    first = 0 if 0 in numbers else 1
    m = matches[0]
    for missing in sorted(set(range(first, min(last, 9999) + 1)) - numbers):
        name = f"{m[1]}{missing:0{len(m[2])}}{m[3]}{m[4]}.safetensors"
        files.problems.append(f"{name} is missing, a shard of {last + 1 - first}.")
    return [m[0] for m in matches]


def _read_index(files: Files) -> dict[str, str]:
    try:
        index = read_json(files.folder / INDEX)
        weight_map = index["weight_map"]
        good = bool(weight_map) and all(
            name.isprintable() and isinstance(file, str) for name, file in weight_map.items()
        )
    except (ValueError, FileNotFoundError) as e:  # no file: a link that leads nowhere
        files.problems.append(f"{INDEX} is missing." if isinstance(e, OSError) else str(e))
        return {}
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        files.problems.append(f"{INDEX} holds no weight_map of tensors to files.")
        return {}
    placed = {}
    outside = set()
    for tensor, name in weight_map.items():
        if _plain(name):
            placed[tensor] = name
        elif name not in outside:
            outside.add(name)
            files.problems.append(
                f"{INDEX}: {tensor} is said to be in {name!r:.200}; only safetensors of this very "
                "folder are read."
            )
    metadata = index.get("metadata")
    files.total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return placed


def _plain(name: str) -> bool:
    """A file of the folder itself: no path, no drive, nothing hidden in it."""
    return bool(re.fullmatch(r"[\w][\w.+-]*\.safetensors", name, re.ASCII))


def _compare_with_index(files: Files, placed: dict[str, str]) -> None:
    opened = {f.path.name for f in files.files}
    for tensor, name in placed.items():
        if name not in opened:
            continue  # said already
        found = files.tensors.get(tensor)
        if found is None:
            files.problems.append(f"{tensor} is not in {name}, where {INDEX} puts it.")
        elif found.file.path.name != name:
            files.problems.append(f"{tensor} is in {found.file.path.name}; {INDEX} says {name}.")
    for tensor in files.tensors.keys() - placed.keys():
        where = files.tensors[tensor].file.path.name
        files.problems.append(f"{tensor} is in {where} but not in {INDEX}.")
    total = sum(t.nbytes for t in files.tensors.values())
    if files.total_size not in (None, total) and not files.problems:
        files.notes.append(
            f"{INDEX} says total_size {files.total_size}; the tensors hold {total} bytes."
        )


def _nothing(folder: Path) -> str:
    """Why a folder has no tensors for us: what else lies there."""
    for pattern, what, way_out in FOREIGN:
        if found := sorted(folder.glob(pattern)):
            return f"{found[0].name} is {what}; {way_out or WORKS}."
    if (folder / "original" / CONFIG).is_file():
        return f"no safetensors here; OpenAI's layout lies in {folder / 'original'}: give that."
    if deeper := sorted(folder.glob("snapshots/*")):
        return f"no safetensors here; the files lie in {deeper[0]}."
    return f"no safetensors here; {WORKS}."
