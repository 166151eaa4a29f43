"""Several hosts, one model. Run the same command on every host (or under srun or mpirun):

    python examples/multihost.py --mesh data=2,expert=8 --distributed
    python examples/multihost.py --mesh expert=2 --coordinator HOST:PORT --processes 2 \\
        --process-id I

Process 0 prints what lies where, and the answers; all of them have the answers.
"""

import argparse

import gptoss_jax as gj
from gptoss_jax import sharding

PROMPTS = ["Mesh: data, expert, tensor.", "One row of the batch is longer than the other one."]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a name")
    parser.add_argument("--mesh", required=True, help="data=D,expert=E,tensor=T; all devices")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--distributed", action="store_true", help="SLURM or Open MPI, by jax")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    args = parser.parse_args()

    # Before anything touches a device. Without any of these options the environment is not read.
    sharding.start(
        detect=args.distributed,
        coordinator=args.coordinator,
        processes=args.processes,
        process_id=args.process_id,
    )
    mesh = gj.make_mesh(**sharding.parse_mesh(args.mesh))

    # Every process reads its own slices of the checkpoint; if one cannot, all stop with its reason.
    model = gj.load(args.model, mesh=mesh)
    tokenizer = gj.Tokenizer.load(args.model)
    sharding.say(sharding.describe(model))

    # Every process passes all prompts and gets all answers.
    out = gj.generate(
        model,
        [tokenizer.encode(prompt) for prompt in PROMPTS],
        max_new_tokens=args.max_new_tokens,
        sampler=gj.Sampler(temperature=0.0),
    )
    for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
        sharding.say(f"{prompt} -> {tokenizer.decode(tokens)!r}")
    sharding.stop()


if __name__ == "__main__":
    main()
