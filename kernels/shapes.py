"""Named problems, shared by tests, tuning and the benchmark."""

import dataclasses

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# Measured on one H200: what a copy and a large bfloat16 matmul reach. Floors are against these.
BYTES_PER_US = 4.3e6
FLOP_PER_US = 790e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """One layer's mixture of experts at one number of tokens."""

    model: str
    tokens: int  # N
    embed: int = 2880  # D
    ffn: int = 2880  # F
    experts: int  # E
    chosen: int = 4  # X

    @property
    def name(self) -> str:
        return f"{self.model}/{self.tokens}"

    def hit(self) -> float:
        """Experts that somebody chooses, if all are as likely: E (1 - (1 - X/E)^N)."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** self.tokens)

    def weight_bytes(self) -> float:
        """Packed bytes of the experts hit, 17 bytes a block of 32 weights; each read once."""
        return self.hit() * 3 * self.embed * self.ffn * 17 / 32

    def flop(self) -> float:
        """Of both matmuls, without padding."""
        return 2.0 * self.tokens * self.chosen * 3 * self.embed * self.ffn

    def floor_us(self) -> float:
        """No faster than reading the weights, nor than the tensor cores."""
        return max(self.weight_bytes() / BYTES_PER_US, self.flop() / FLOP_PER_US)


def experts(model: str, tokens: int) -> Experts:
    """The layer of "20b" or "120b"."""
    return Experts(model=model, tokens=tokens, experts={"20b": 32, "120b": 128}[model])


EXPERTS = tuple(experts(model, tokens) for model in ("20b", "120b") for tokens in TOKENS)
