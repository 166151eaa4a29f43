"""What a checkpoint fixes. How to run (mesh, dtype, backend, batch) is an argument elsewhere."""

import dataclasses
import sys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The architecture of one gpt-oss model.

    Raises ValueError naming every field whose value cannot be.
    """

    layers: int
    embed: int  # D
    kv_heads: int  # K
    q_per_kv: int  # G
    head_width: int  # H
    experts: int  # E
    experts_per_token: int  # X
    ffn: int  # F
    vocab: int  # V
    window: int  # positions a sliding layer sees, the query's own included
    sliding: tuple[bool, ...] | None = None  # by layer; None: even layers slide
    norm_eps: float = 1e-5
    swiglu_limit: float | None = 7.0  # None: no clamp
    swiglu_alpha: float = 1.702
    rope_theta: float = 150_000.0
    rope_factor: float = 32.0  # YaRN: how far the context is stretched; 1.0 is plain rotary
    rope_original_context: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = False
    max_context: int = 131_072  # positions
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def __post_init__(self):
        if self.sliding is None:
            object.__setattr__(self, "sliding", tuple(i % 2 == 0 for i in range(self.layers)))
        problems = [
            f"{name} must be a whole number of at least 1; got {value!r}"
            for name in _COUNTS
            if not _is_whole(value := getattr(self, name)) or value < 1
        ]
        problems += [
            f"{name} must be finite and above 0; got {value!r}"
            for name in _POSITIVE
            if not _is_real(value := getattr(self, name)) or value <= 0
        ]
        if not problems:
            problems = list(self._inconsistencies())
        if problems:
            raise ValueError("this cannot be a gpt-oss configuration: " + "; ".join(problems))

    def _inconsistencies(self):
        if len(self.sliding) != self.layers:
            yield f"sliding names {len(self.sliding)} layers but layers is {self.layers}"
        if self.experts_per_token > self.experts:
            yield f"experts_per_token {self.experts_per_token} exceeds experts {self.experts}"
        if self.head_width % 2:
            yield f"head_width must be even, rotary turns pairs; got {self.head_width}"
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            yield f"swiglu_limit must be above 0, or None for no clamp; got {self.swiglu_limit!r}"
        if self.rope_theta <= 1:
            yield f"rope_theta must be above 1, channels turn ever slower; got {self.rope_theta!r}"
        if self.rope_factor < 1:
            yield f"rope_factor must be at least 1; got {self.rope_factor!r}"
        if self.rope_beta_fast <= self.rope_beta_slow:
            yield (
                f"rope_beta_fast {self.rope_beta_fast} must exceed "
                f"rope_beta_slow {self.rope_beta_slow}"
            )
        for name, ids in {"eos": self.eos, "pad": () if self.pad is None else (self.pad,)}.items():
            if bad := [i for i in ids if not _is_whole(i) or i < 0]:
                yield f"{name} holds {bad}, which are not token ids"

    def window_of(self, layer: int) -> int | None:
        """Positions that layer sees, or None where it sees everything."""
        return self.window if self.sliding[layer] else None

    @property
    def q_heads(self) -> int:
        """K·G."""
        return self.kv_heads * self.q_per_kv

    @property
    def parameters(self) -> int:
        """Parameters of the model (values, not packed bytes)."""
        heads = self.head_width * (self.q_heads + 2 * self.kv_heads)
        attention = (
            heads * (self.embed + 1) + (self.q_heads * self.head_width + 1) * self.embed
        ) + self.q_heads
        router = self.experts * (self.embed + 1)
        expert = 2 * self.ffn * (self.embed + 1) + self.embed * (self.ffn + 1)
        layer = attention + router + self.experts * expert + 2 * self.embed
        return self.layers * layer + 2 * self.vocab * self.embed + self.embed

    @classmethod
    def gpt_oss_20b(cls) -> "Config":
        """openai/gpt-oss-20b: 20,914,757,184 parameters, 12.8 GiB as published."""
        return cls(layers=24, experts=32, **_PUBLISHED)

    @classmethod
    def gpt_oss_120b(cls) -> "Config":
        """openai/gpt-oss-120b: 116,829,156,672 parameters, 60.8 GiB as published."""
        return cls(layers=36, experts=128, **_PUBLISHED)


_PUBLISHED = dict(
    embed=2880,
    kv_heads=8,
    q_per_kv=8,
    head_width=64,
    experts_per_token=4,
    ffn=2880,
    vocab=201_088,
    window=128,
    eos=(200_002,),
    pad=199_999,
)
_COUNTS = (
    "layers embed kv_heads q_per_kv head_width experts experts_per_token ffn vocab window "
    "rope_original_context max_context"
).split()
_POSITIVE = ("norm_eps swiglu_alpha rope_theta rope_factor rope_beta_fast rope_beta_slow").split()


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # not NaN, nor 10**400
