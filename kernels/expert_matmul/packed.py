"""Where a Triton kernel finds a tile's weights, scales and activations, in each packed layout.

A program multiplies `cols` pairs of weight rows. In both layouts a lane of 16 bits holds four
weights, and a tile of lanes [C, L] meets activations [L, R] in a few dots:

                  rows of a lane   places of columns in it   loads of lanes for a tile of columns
    Lanes         1 of a plane     4                         one for each plane and run of lanes
    Fragments     both             2                         one

Row r of a pair is plane r: gate and up, or of down two values of the output.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from ..mxfp4.codec import BLOCK
from ..mxfp4.fragments import DEPTH, ROWS
from ..mxfp4.lanes import LANES, PLACES

# The order of activations in memory. "natural" is column order. Others make a tile's dot meet a
# long run of them: in natural order that is 16 bytes of every 64, and L2 moves sectors of 32.
#   "chunked"   in 128 columns, the 4 by 4 chunks of 8 transposed: a run for each place of a lane
#   "joined"    in 32 columns, 4 by 8 transposed: the four places of a lane next to each other, for
#               one dot over all of them
#   "fragment"  in 64 columns, that of the lanes of `mxfp4.fragments`: a run for each place
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
    fragment: value 64 s + 16 i + 8 h + 2 c + v moves to 64 s + 32 h + 8 c + 2 i + v
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
        x = x_ND.reshape(rows, -1, 4, 2, 4, 2)
        return x.transpose(0, 1, 3, 4, 2, 5).reshape(rows, width)
    return x_ND


def place_of(col_C, order):
    """As to_order, of indices in a kernel."""
    if order == "natural":
        return col_C
    if order == "fragment":
        s_C, rest_C = split(col_C, DEPTH)
        i_C, rest_C = split(rest_C, 16)
        h_C, rest_C = split(rest_C, 8)
        c_C, v_C = split(rest_C, 2)
        return s_C * DEPTH + h_C * 32 + c_C * 8 + i_C * 2 + v_C
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

    def block(self):
        """[L]: which block of the step each lane of a tile belongs to."""
        return split(jnp.arange(self.depth), self.lanes)[0]

    def _within(self):
        return split(jnp.arange(self.depth), self.lanes)[1]

    def scale_at(self, i, offset, col):
        """Index of [C, L] scales of step i; offset: None, or blocks [C, 1] further."""
        return self._at(i, offset), col

    def lane_at(self, i, offset, col, run, plane):
        """Index of [C, L] lanes."""
        return plane, self._at(i, offset), (run + self._within())[None, :], col

    def _at(self, i, offset):
        at = (i * self.groups + self.block())[None, :]
        return at if offset is None else at + offset

    def columns(self, i, run, place):
        """[L]: where the activations of a tile's place lie."""
        if self.order == "natural":
            at_L = i * self.groups + self.block()
            return at_L * BLOCK + place * LANES + run + self._within()
        block_L, inner_L = split(i * self.groups + self.block(), PLACES)
        return block_L * CHUNKED + place * BLOCK + inner_L * LANES + run + self._within()

    def code(self, place: int, plane: int) -> int:
        """The place in a lane of a plane's weights."""
        return place

    @staticmethod
    def row_of(pair, plane: int, half: int):
        """The matrix's row, of down."""
        return plane * half + pair


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Of `mxfp4.fragments`, its tiles flat: lanes [E, T, S, 1024], in steps of `groups` blocks."""

    blocks: tuple[int, ...]
    groups: int  # even: two to a step of the layout
    order: str
    places = 2
    loads = (0,)  # a lane holds both planes

    @property
    def total(self) -> int:
        return self.blocks[2] * (DEPTH // BLOCK)

    @property
    def half(self) -> int:
        return self.blocks[1] * (ROWS // 2)

    @property
    def runs(self) -> range:
        return range(1)

    @property
    def depth(self) -> int:
        return self.groups * LANES * 2

    def _parts(self):
        """[L]: the layout's step of each lane, and which of its 32 it is."""
        return split(jnp.arange(self.depth), 32)

    def block(self):
        s_L, lane_L = self._parts()
        return 2 * s_L + split(split(lane_L, 4)[0], 2)[1]

    def _step(self, i, offset):
        s = (i * (self.groups // 2) + self._parts()[0])[None, :]
        return s if offset is None else s + split(offset, 2)[0]

    def scale_at(self, i, offset, col):
        tile, pair = split(col, 32)
        _, lane_L = self._parts()
        within_L = split(split(lane_L, 4)[0], 2)[1]
        return tile, self._step(i, offset), pair * 2 + within_L[None, :]

    def lane_at(self, i, offset, col, run, plane):
        tile, pair = split(col, 32)
        return tile, self._step(i, offset), pair * 32 + self._parts()[1][None, :]

    def columns(self, i, run, place):
        s_L, lane_L = self._parts()
        first_L = (i * (self.groups // 2) + s_L) * DEPTH
        if self.order == "fragment":
            return first_L + 32 * place + lane_L
        c_L, rest_L = split(lane_L, 8)
        i_L, v_L = split(rest_L, 2)
        return first_L + 16 * i_L + 8 * place + 2 * c_L + v_L

    def code(self, place: int, plane: int) -> int:
        return 2 * place + plane

    @staticmethod
    def row_of(pair, plane: int, half: int):
        return 2 * pair + plane
