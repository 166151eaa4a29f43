"""The held-out tenth: decided by a hash of what a question is about, so no phrasing can leak it."""

import hashlib
import json

PARTS = 10


def held_out(*about) -> bool:
    """True for the tenth of all subjects (an operand pair, a word, a list) kept from training.

    Order does not matter: 27 + 58 and 58 + 27 fall on the same side.
    """
    key = json.dumps(sorted(map(str, about)))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % PARTS == 0


def draw(rng, wanted: bool, make):
    """make(rng) -> (subject, value), repeated until the subject lies on the wanted side."""
    while True:
        about, value = make(rng)
        if held_out(*about) == wanted:
            return value
