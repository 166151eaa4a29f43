"""What the two dispatches cost a step, by arithmetic: `python -m gptoss_jax.sharding.cost`.

For one layer, D values a token, X experts chosen, R devices of expert, N tokens of one data row:

all_reduce   a ring moves 2 (R - 1) / R of N·D float32 through each device, in one collective.
all_to_all   each device has N / R tokens; each goes to d = R (1 - C(E - e, X) / C(E, X)) devices of
             e = E / R experts, a share (R - 1) / R of them elsewhere; D values of two bytes go
             and D come back, and an all-gather makes the next layer's input whole again ((R - 1)
             / R of N tokens, two bytes a value). Four collectives, plus the sorting.

Compute is the same for both (each expert sees its tokens once), so it is left out of the choice and
shown beside it. Nothing here was measured on more than one GPU; bandwidths and latencies are those
stated in `LINKS`.
"""

import dataclasses
from math import comb


@dataclasses.dataclass(frozen=True)
class Link:
    """bytes_s: per GPU and direction, what collectives reach. latency_s: of one collective."""

    bytes_s: float
    latency_s: float


# NVLink 4: 450 GB/s a direction, about 80 % of it reached. InfiniBand NDR, one 400 Gbit/s card a
# GPU: 50 GB/s, about 90 % reached. Latencies grow with the number of devices; these are for few.
LINKS = {
    "NVLink": Link(bytes_s=360e9, latency_s=12e-6),
    "InfiniBand": Link(bytes_s=45e9, latency_s=25e-6),
}
SORT_S = 15e-6  # the sorts, gathers and the read of the number of rounds of one all_to_all
FLOPS_S = 400e12  # of a GPU on experts, at prefill


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one layer on one device: bytes sent, seconds of communication."""

    bytes: float
    seconds: float


def destinations(experts: int, chosen: int, ranks: int) -> float:
    """On how many of the devices a token's experts lie, in the mean, if all choices are as
    likely."""
    missed = comb(experts - experts // ranks, chosen) / comb(experts, chosen)
    return ranks * (1 - missed)


def all_reduce(tokens: int, embed: int, ranks: int, link: Link) -> Cost:
    sent = 2 * (ranks - 1) / ranks * tokens * embed * 4
    return Cost(sent, link.latency_s + sent / link.bytes_s)


def all_to_all(
    tokens: int, embed: int, ranks: int, link: Link, *, experts: int, chosen: int
) -> Cost:
    elsewhere = (ranks - 1) / ranks
    rows = tokens / ranks * destinations(experts, chosen, ranks) * elsewhere
    sent = rows * embed * (2 + 2) + elsewhere * tokens * embed * 2
    return Cost(sent, 4 * link.latency_s + SORT_S + sent / link.bytes_s)


def switch(embed: int, ranks: int, link: Link, *, experts: int, chosen: int) -> int | None:
    """The least tokens (a power of two) from which all_to_all is the faster, if any below 2^20."""
    for tokens in (1 << power for power in range(21)):
        reduced = all_reduce(tokens, embed, ranks, link)
        sent = all_to_all(tokens, embed, ranks, link, experts=experts, chosen=chosen)
        if sent.seconds < reduced.seconds:
            return tokens
    return None


def table(embed: int = 2880, experts: int = 128, chosen: int = 4, layers: int = 36) -> str:
    """Markdown: 120b's step over 1..64 GPUs, both ways, and where all_to_all becomes the faster."""
    lines = [
        "| GPUs | link | tokens | all_reduce MB | ms | all_to_all MB | ms | compute ms "
        "| switch at |",
        "|" + "---|" * 9,
    ]
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        for name in ("NVLink", "InfiniBand") if 1 < ranks <= 8 else ("InfiniBand",):
            link = LINKS[name]
            at = switch(embed, ranks, link, experts=experts, chosen=chosen) if ranks > 1 else None
            for tokens in (8, 2048, 16384):
                a = all_reduce(tokens, embed, ranks, link)
                b = all_to_all(tokens, embed, ranks, link, experts=experts, chosen=chosen)
                compute = 6 * tokens * chosen * embed * embed / ranks / FLOPS_S
                if ranks == 1:  # nothing is sent
                    a = b = Cost(0.0, 0.0)
                cells = [
                    str(ranks),
                    name if ranks > 1 else "-",
                    str(tokens),
                    f"{layers * a.bytes / 1e6:,.1f}",
                    f"{layers * a.seconds * 1e3:.2f}",
                    f"{layers * b.bytes / 1e6:,.1f}",
                    f"{layers * b.seconds * 1e3:.2f}",
                    f"{layers * compute * 1e3:.2f}",
                    "never" if at is None else f"{at} tokens ({at // ranks} a GPU)",
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
