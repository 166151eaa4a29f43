"""The few shapes that generation compiles, so that another prompt length or batch compiles nothing.

    rows       1, 2, 4, 8, then multiples of 8, then up to a multiple of the mesh's data axis
    capacity   128, 256, 512, 1024, then 1536, 2048, 3072, 4096, 6144, ... cache slots
    chunk      16, 64, 256, 512, 1024, 2048, 4096, 8192 tokens of each row in one prefill call
    room       128, 512, 2048, ... tokens in the buffer that one decode call may fill
    stops      4, 8, 16, ... stop tokens

Padding costs little: padded rows and tokens reach no expert and write no cache, and chunks below
about 256 tokens are bound by reading the weights, whatever their length.
"""

from collections.abc import Iterator

CHUNKS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
# Tokens of one prefill call, over all rows. On a GPU enough that 128 experts get 256 rows each;
# at 20b's width their activations take about 0.6 GB.
TOKENS_ON_GPU = 8192
TOKENS_ELSEWHERE = 1024


def rows(batch: int, data: int) -> int:
    """Rows that are run for a batch on a mesh with this data axis."""
    size = next((n for n in (1, 2, 4, 8) if n >= batch), _up(batch, 8))
    return _up(size, data)


def capacity(positions: int, limit: int) -> int:
    """Cache slots for a row of so many positions, at most the model's limit."""
    size = 128
    while size < positions:
        size = size * 3 // 2 if size >= 1024 and size & (size - 1) == 0 else _power(size + 1)
    return min(size, limit)


def chunks(length: int, batch: int, tokens: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the prefill calls for rows of at most `length` tokens.

    tokens: over all rows in one call. The last part is padded up where at most a quarter of it (or
    of 256 tokens) is padding, else cut once more: 1,100 tokens are 1,024 and 256.
    """
    largest = max((c for c in CHUNKS if c * batch <= tokens), default=CHUNKS[0])
    sizes = [c for c in CHUNKS if c <= largest]
    start = 0
    while (left := length - start) > 0:
        over = next((c for c in sizes if c >= left), None)
        if over is not None and (over <= 256 or 4 * (over - left) <= over):
            size = over
        else:
            size = max(c for c in sizes if c <= left)
        yield start, size
        start += size


def room(new_tokens: int) -> int:
    """Entries of the output buffer of one decode call."""
    size = 128
    while size < new_tokens:
        size *= 4
    return size


def stops(count: int) -> int:
    """Entries of the padded list of stop tokens."""
    return max(4, _power(count))


def _power(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
