"""Where a Triton kernel finds a tile's weights, scales and activations, in each packed layout.

A program multiplies `cols` pairs of weight rows. In both layouts a lane of 16 bits holds four
weights, and a tile of lanes [C, L] meets activations [L, R] in a few dots:

                  rows of a lane   places of columns in it   loads of lanes for a tile of columns
    Lanes         1 of a plane     4                         one for each plane and run of lanes
    Fragments     both             2, in two blocks          one for each 64 columns

Row r of a pair is plane r: gate and up, or of down two values of the output.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from ..mxfp4.codec import BLOCK
from ..mxfp4.fragments import DEPTH, PAIRS, PER_PAIR
from ..mxfp4.in_kernel import scale_of, scale_of_word
from ..mxfp4.lanes import LANES, PLACES

# The order of activations in memory. "natural" is column order. Others make a tile's dot meet a
# long run of them: in natural order that is 16 bytes of every 64, and L2 moves sectors of 32.
#   "chunked"   in 128 columns, the 4 by 4 chunks of 8 transposed: a run for each place of a lane
#   "joined"    in 32 columns, 4 by 8 transposed: the four places of a lane next to each other, for
#               one dot over all of them
#   "fragment"  in 32 columns, that of the lanes of `mxfp4.fragments`: a run for each place
CHUNKED = PLACES * BLOCK


def split(value_C, by):
    """Quotient and remainder by lax: the floor fix-up of // and % hides runs from Triton."""
    by_C = jnp.full_like(value_C, by)
    return jax.lax.div(value_C, by_C), jax.lax.rem(value_C, by_C)


def ordered_width(width: int, order: str) -> int:
    """The width of activations in an order: whole blocks of 128 where chunked."""
    return -(-width // CHUNKED) * CHUNKED if order == "chunked" else width


def to_order(x_ND: Array, order: str) -> Array:
    """Activations in an order.

    chunked: value 128 i + 32 g + 8 p + j moves to 128 i + 32 p + 8 g + j, its own inverse
    joined: value 32 g + 8 p + j moves to 32 g + 4 j + p
    fragment: value 32 g + 16 i + 8 h + 2 c + v moves to 32 g + 8 c + 4 i + 2 h + v
    """
    rows, width = x_ND.shape
    if order == "chunked":
        x_ND = jnp.pad(x_ND, ((0, 0), (0, ordered_width(width, order) - width)))
        x = x_ND.reshape(rows, -1, PLACES, PLACES, LANES)
        return jnp.swapaxes(x, 2, 3).reshape(rows, -1)
    if order == "joined":
        x = x_ND.reshape(rows, -1, PLACES, LANES)
        return jnp.swapaxes(x, 2, 3).reshape(rows, -1)
    if order == "fragment":
        x = x_ND.reshape(rows, -1, 2, 2, 4, 2)  # i h c v
        return x.transpose(0, 1, 4, 2, 3, 5).reshape(rows, width)
    return x_ND


def place_of(col_C, order):
    """As to_order, of indices in a kernel."""
    if order == "natural":
        return col_C
    if order == "fragment":
        g_C, rest_C = split(col_C, BLOCK)
        i_C, rest_C = split(rest_C, 16)
        h_C, rest_C = split(rest_C, 8)
        c_C, v_C = split(rest_C, 2)
        return g_C * BLOCK + c_C * 8 + i_C * 4 + h_C * 2 + v_C
    rest_C, j_C = split(col_C, LANES)
    rest_C, p_C = split(rest_C, PLACES)
    if order == "joined":
        return rest_C * BLOCK + j_C * PLACES + p_C
    i_C, g_C = split(rest_C, PLACES)
    return i_C * CHUNKED + p_C * BLOCK + g_C * LANES + j_C


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Of `mxfp4.lanes`, in steps of `groups` blocks of 32 columns; `lanes` of each block a tile."""

    blocks: tuple[int, ...]  # shape [E, 2, G, 8, half]
    groups: int
    lanes: int
    order: str
    places = PLACES
    loads = (0, 1)  # planes whose lanes are loaded apart

    @property
    def total(self) -> int:
        """Blocks of 32 columns in all."""
        return self.blocks[2]

    @property
    def half(self) -> int:
        """Pairs of rows."""
        return self.blocks[4]

    @property
    def runs(self) -> range:
        """Tiles of lanes in a step."""
        return range(0, LANES, self.lanes)

    @property
    def depth(self) -> int:
        """Lanes in a tile."""
        return self.groups * self.lanes

    def block(self, i, run):
        """[L]: the block that each lane of a tile belongs to."""
        return i * self.groups + self._split()[0]

    def scale_at(self, at, col):
        """Index of the scales of blocks `at`."""
        return at, col

    def factors(self, pairs, *, wide: bool, interpret: bool):
        """What to multiply the weights of each plane at each place by, [C, L] each."""
        each = [scale_of(pairs, plane, wide=wide, interpret=interpret) for plane in (0, 1)]
        return [[factor] * self.places for factor in each]

    def lane_at(self, at, col, run, plane):
        """Index of the lanes of blocks `at`."""
        return plane, at, (run + self._split()[1])[None, :], col

    def columns(self, i, run, place):
        """[L]: where the activations of a tile's place lie."""
        within_L = run + self._split()[1]
        if self.order == "natural":
            return self.block(i, run) * BLOCK + place * LANES + within_L
        block_L, inner_L = split(self.block(i, run), PLACES)
        return block_L * CHUNKED + place * BLOCK + inner_L * LANES + within_L

    def _split(self):
        return split(jnp.arange(self.depth), self.lanes)

    def code(self, place: int, plane: int) -> int:
        """The place in a lane of a plane's weights."""
        return place

    @staticmethod
    def row_of(pair, plane: int, half: int):
        """The matrix's row, of down."""
        return plane * half + pair


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Of `mxfp4.fragments`, its tiles flat: [E, T, S, 1024]. A tile of lanes is one step of 64
    columns: 64 bytes of each pair of rows, and one word of scales."""

    blocks: tuple[int, ...]
    groups: int  # even: two blocks to a step of the layout
    order: str
    places = 2
    loads = (0,)  # a lane holds both planes
    depth = PER_PAIR

    @property
    def total(self) -> int:
        return self.blocks[2] * (DEPTH // BLOCK)

    @property
    def half(self) -> int:
        return self.blocks[1] * PAIRS

    @property
    def runs(self) -> range:
        return range(0, self.groups, 2)

    def block(self, i, run):
        return jnp.full((1,), i * self.groups + run, jnp.int32)

    def scale_at(self, at, col):
        tile, pair = split(col, PAIRS)
        return tile, _half(at), pair

    def factors(self, words, *, wide: bool, interpret: bool):
        words = jnp.broadcast_to(words, (words.shape[0], PER_PAIR))
        exact = dict(wide=wide, interpret=interpret)
        each = [scale_of_word(words, place, **exact) for place in range(2 * self.places)]
        return each[0::2], each[1::2]

    def lane_at(self, at, col, run, plane):
        tile, pair = split(col, PAIRS)
        return tile, _half(at), pair * PER_PAIR + jnp.arange(PER_PAIR)[None, :]

    def columns(self, i, run, place):
        first, lane_L = (i * self.groups + run) * BLOCK, jnp.arange(PER_PAIR)
        if self.order == "fragment":
            return first + BLOCK * place + lane_L
        c_L, rest_L = split(lane_L, 8)
        i_L, rest_L = split(rest_L, 4)
        h_L, v_L = split(rest_L, 2)
        return first + BLOCK * place + 16 * i_L + 8 * h_L + 2 * c_L + v_L

    def code(self, place: int, plane: int) -> int:
        return 2 * place + plane

    @staticmethod
    def row_of(pair, plane: int, half: int):
        return 2 * pair + plane


def _half(at):
    return split(at, 2)[0]
