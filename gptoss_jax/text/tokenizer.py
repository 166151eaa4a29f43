"""tokenizer.json, read through the `tokenizers` library.

Text is always ordinary text: a user who types `<|start|>` gets the seven pieces of that string and
never the control token. Control tokens are put in by id, looked up by name in `special`.
"""

import codecs
import json
import pathlib
from collections.abc import Iterable

import tokenizers

from ..places import REPOSITORY, TINY, find, local

# Messages are made of these; a vocabulary may give them any ids.
CONTROL = (
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF = _byte_of_character()
# Every byte that UTF-8 can hold, upper case, a ligature, no space in front: what a missing token, a
# normaliser or a prefix would change.
_PROBE = (
    "".join(map(chr, range(0xC0)))
    + "".join(map(chr, [*range(0xC0, 0x800, 0x40), *range(0x800, 0xFFFF, 0x800)]))
    + "\ufb01\U00010000\U00040000\U00080000\U000c0000\U00100000"
)
_PROBE = _PROBE.replace("\ud800", "")


class Tokenizer:
    """A byte-level tokenizer.

    special: ids of the control tokens (and of every other added token) by name.
    size: one more than the largest id that has a text. A model's vocabulary may be larger: those
        rows decode to "" and should never be sampled.
    """

    special: dict[str, int]
    size: int

    def __init__(self, inner: tokenizers.Tokenizer):
        """Takes over a loaded `tokenizers.Tokenizer`.

        Raises ValueError unless it is byte-level and gives every text back.
        """
        decoder = json.loads(inner.decoder.__getstate__())["type"] if inner.decoder else None
        if decoder != "ByteLevel":
            raise ValueError(
                f"gpt-oss tokenizers are byte-level; this tokenizer.json decodes with {decoder!r}."
            )
        added = inner.get_added_tokens_decoder()
        # An added token that is not marked special would be recognised inside user text.
        inner.add_special_tokens(
            [
                tokenizers.AddedToken(token.content, normalized=False, special=True)
                for token in added.values()
                if not token.special
            ]
        )
        inner.encode_special_tokens = True  # that is: encode their names as ordinary text
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.special = {token.content: id for id, token in added.items()}
        vocab = inner.get_vocab(with_added_tokens=True)
        self.size = 1 + max(vocab.values(), default=-1)
        self._name_of = {id: name for name, id in self.special.items()}
        strange = set("".join(vocab.keys() - self.special.keys())) - _BYTE_OF.keys()
        if strange or self.decode(self.encode(_PROBE)) != _PROBE:
            raise ValueError(
                "this tokenizer.json does not give text back: "
                + (
                    f"its tokens hold {min(strange)!r}, which stands for no byte."
                    if strange
                    else "tokens are missing, or text is changed before it is cut into them."
                )
            )

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Tokenizer":
        """Reads "tiny" (the embedded model's), a tokenizer.json, or a checkpoint that holds one.

        A checkpoint is a folder or a name in Hugging Face's local cache, as for `load`. For an
        `original/` folder, which has no tokenizer.json, the folder above it is looked at.
        Raises ValueError where there is no tokenizer.json or it cannot be read.
        """
        file = _tokenizer_file(path)
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
        return cls(inner)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. Lone surrogates, which no UTF-8 holds, become U+FFFD.

        Raises ValueError for what is no string.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string; got {type(text).__name__}.")
        try:
            return self._inner.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._inner.encode(text, add_special_tokens=False).ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token: a control token's name; none of an id beyond the vocabulary."""
        name = self._name_of.get(id)
        if name is not None:
            return name.encode()
        token = self._inner.id_to_token(_checked(id))
        return b"" if token is None else bytes(_BYTE_OF[character] for character in token)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control tokens show as their names, invalid UTF-8 as U+FFFD."""
        return b"".join(self.token_bytes(int(id)) for id in ids).decode("utf-8", "replace")

    def control(self, name: str) -> int:
        """The id of a control token; ValueError where this vocabulary has none of that name."""
        if name not in self.special:
            raise ValueError(f"this tokenizer has no token {name!r}, which Harmony needs.")
        return self.special[name]


class StreamDecoder:
    """Decodes ids as they come, holding back a character until its last byte is there.

    The pieces joined, `flush` included, equal `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this id completes, possibly ""."""
        return self._utf8.decode(self._tokenizer.token_bytes(int(id)))

    def flush(self) -> str:
        """U+FFFD where a character was left unfinished, else ""; ready for the next text."""
        return self._utf8.decode(b"", final=True)


def _checked(id: int) -> int:
    if id < 0:
        raise ValueError(f"token ids are not negative; got {id}.")
    # ids of the library are uint32; nothing that large is in a vocabulary
    return min(id, 2**32 - 1)


def _tokenizer_file(path: str | pathlib.Path) -> pathlib.Path:
    if path == "tiny":
        return TINY / "tokenizer.json"
    given = local(path)
    if given.is_file():
        return given
    if not given.exists() and REPOSITORY.fullmatch(str(path)):
        given = find(path)
    for folder in (given, given.parent) if given.name == "original" else (given,):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    raise ValueError(
        f"no tokenizer.json at {given}. Give the file, or a checkpoint folder that holds it."
    )
