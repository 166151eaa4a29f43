"""Tokens as messages, whole or as they are sampled.

A message is `<|start|>` header `<|message|>` content and a token that ends it. Models sometimes
write something else. Unless `strict`, what can be read is read, and every token that found no
place in a message is kept in `remainder`; no sequence of ids raises.
"""

import dataclasses
from collections.abc import Iterable

from gptoss_jax.text.harmony.builtin import BUILTIN
from gptoss_jax.text.harmony.messages import ROLES, HarmonyError, Message
from gptoss_jax.text.tokenizer import StreamDecoder, Tokenizer

ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
_NAMESPACES = ("functions", *BUILTIN)


@dataclasses.dataclass(frozen=True)
class Delta:
    """What some tokens added to one message.

    index: which message. header: the message with its content left out.
    text: what was added; the deltas of one message joined are its content.
    end: the name of the token that ended the message, or None while it goes on.
    """

    index: int
    header: Message
    text: str
    end: str | None = None


class Parsed(list[Message]):
    """Messages, the last one with what there was of it.

    finish: the token that ended the last message by name; None if it was cut short, as it is when
        the length ran out. A call is complete only if this is "<|call|>". (`generate` leaves the
        stop token out, so there it is None, and the finish reason "stop" says the same.)
    remainder: ids that belong to no message: the start of a header, or what should not be there.
    problems: what was not as it should be, in words. Being cut short is none.
    """

    finish: str | None
    remainder: list[int]
    problems: list[str]

    def __init__(
        self,
        messages: Iterable[Message] = (),
        finish: str | None = None,
        remainder: Iterable[int] = (),
        problems: Iterable[str] = (),
    ):
        super().__init__(messages)
        self.finish = finish
        self.remainder = list(remainder)
        self.problems = list(problems)


class Parser:
    """Reads ids one or many at a time; how they are cut makes no difference to the messages.

    role: whose message the first ids continue, as those sampled after a prompt do. They may also
        begin with `<|start|>`, as a whole conversation does.
    strict: raise HarmonyError at the first id that is out of place. Being cut short is not: it
        shows in `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, *, role: str = "assistant", strict: bool = False):
        if role not in ROLES or role == "tool":
            raise ValueError(f"the first message is one of a role but tool's; got {role!r}.")
        self._tokenizer = tokenizer
        self._strict = strict
        self._name_of = {id: name for name, id in tokenizer.special.items()}
        self._start = tokenizer.control("<|start|>")
        self._message = tokenizer.control("<|message|>")
        self._decoder = StreamDecoder(tokenizer)
        self._position = -1
        self._role: str | None = role
        self._head: list[int] | None = []  # ids of the header being read
        self._current: Message | None = None  # header of the message being read
        self._texts: list[str] = []
        self._done: list[Message] = []
        self._deltas: list[Delta] = []
        self._finish: str | None = None
        self._remainder: list[int] = []
        self._problems: list[str] = []

    def feed(self, ids: int | Iterable[int]) -> list[Delta]:
        """Takes the next ids and says what they added, at most one Delta a message."""
        for id in [ids] if isinstance(ids, int) else ids:
            self._position += 1
            self._one(int(id))
        return self._take()

    def finish(self) -> list[Delta]:
        """Says that no ids follow: an unfinished character becomes U+FFFD, a header remainder."""
        if self._current is not None:
            self._add(self._decoder.flush())
        elif self._head:
            self._remainder += [*([self._start] if self._role is None else []), *self._head]
            self._head = None
        elif self._head is not None and self._role is None:
            self._remainder.append(self._start)
            self._head = None
        return self._take()

    @property
    def messages(self) -> Parsed:
        """All there is so far, the message being read included."""
        messages = list(self._done)
        if self._current is not None:
            messages.append(dataclasses.replace(self._current, content="".join(self._texts)))
        finish = None if self._current is not None else self._finish
        return Parsed(messages, finish, self._remainder, self._problems)

    def _one(self, id: int) -> None:
        name = self._name_of.get(id)
        if self._current is not None:
            self._in_content(id, name)
        elif self._head is not None:
            self._in_header(id, name)
        elif id == self._start:
            self._head = []
        else:
            self._stray([id], f"{self._shown(id)} between messages")

    def _in_content(self, id: int, name: str | None) -> None:
        if name in ENDS:
            self._close(name)
        elif id == self._start:
            self._complain("<|start|> inside a message, which has not ended")
            self._close(None)
            self._head = []
        elif name is not None or not 0 <= id < self._tokenizer.size:
            self._stray([id], f"{self._shown(id)} inside a message")
        else:
            self._add(self._decoder.push(id))

    def _in_header(self, id: int, name: str | None) -> None:
        assert self._head is not None
        if id == self._message:
            self._current = self._header(self._head)
            self._texts, self._head, self._role = [], None, None
        elif id == self._start and self._role is not None and not self._head:
            self._role = None  # not a continuation: a conversation from its beginning
        elif id == self._start:
            opening = [self._start] if self._role is None else []
            self._stray([*opening, *self._head], "<|start|> inside a header")
            self._head, self._role = [], None
        elif name in ENDS:
            opening = [self._start] if self._role is None else []
            self._stray([*opening, *self._head, id], f"{name} inside a header")
            self._head, self._role, self._finish = None, None, name
        else:
            self._head.append(id)

    def _header(self, ids: list[int]) -> Message:
        """Role, recipient, channel and content type, in whichever order the model put them."""
        fields: dict[str, str] = {}
        role = self._role
        for opening, words in self._segments(ids):
            if opening == "<|channel|>":
                if words:
                    self._set(fields, "channel", words.pop(0))
                else:
                    self._complain("a channel without a name")
            elif opening == "<|constrain|>":
                self._set(fields, "content_type", opening + (words.pop(0) if words else ""))
            elif role is None and words:
                role, fields = _author(words.pop(0))
            elif self._role is not None and words and words[0] == self._role:
                words.pop(0)
            for word in words:
                if word.startswith("to="):
                    self._set(fields, "recipient", word.removeprefix("to="))
                elif word.split(".")[0] in _NAMESPACES:
                    self._set(fields, "recipient", word)
                else:
                    self._set(fields, "content_type", word)
        if role is None:
            self._complain("a header without a role")
        known = "recipient" in fields or fields.get("name", "").split(".")[0] in _NAMESPACES
        if role == "tool" and not known:
            self._complain(
                f"role {fields['name']!r} is not known and no tool's, lacking a recipient"
            )
        return Message(role or "assistant", **fields)

    def _segments(self, ids: list[int]) -> Iterable[tuple[str, list[str]]]:
        """Words of the header, apart by the control token before them ("" for the first)."""
        opening, text = "", []
        for id in ids:
            name = self._name_of.get(id)
            if name in ("<|channel|>", "<|constrain|>"):
                yield opening, self._tokenizer.decode(text).split()
                opening, text = name, []
            elif name is not None or not 0 <= id < self._tokenizer.size:
                self._stray([id], f"{self._shown(id)} inside a header")
            else:
                text.append(id)
        yield opening, self._tokenizer.decode(text).split()

    def _set(self, fields: dict[str, str], field: str, value: str) -> None:
        if not value:
            self._complain(f"{field} is empty in a header")
        elif field in fields:
            self._complain(f"{field} is given twice, {fields[field]!r} and {value!r}")
        else:
            fields[field] = value

    def _add(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._emit(text, None)

    def _close(self, end: str | None) -> None:
        assert self._current is not None
        self._add(self._decoder.flush())
        self._emit("", end)
        content = "".join(self._texts)
        self._done.append(dataclasses.replace(self._current, content=content))
        self._current, self._texts, self._finish = None, [], end

    def _emit(self, text: str, end: str | None) -> None:
        assert self._current is not None
        index = len(self._done)
        if self._deltas and self._deltas[-1].index == index:
            text = self._deltas.pop().text + text
        self._deltas.append(Delta(index, self._current, text, end))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _stray(self, ids: list[int], problem: str) -> None:
        self._complain(problem)
        self._remainder += ids

    def _complain(self, problem: str) -> None:
        if self._strict:
            raise HarmonyError(problem, self._position)
        self._problems.append(f"token {self._position}: {problem}")

    def _shown(self, id: int) -> str:
        return self._name_of.get(id) or f"id {id}"


def parse(
    ids: Iterable[int], tokenizer: Tokenizer, *, role: str = "assistant", strict: bool = False
) -> Parsed:
    """The messages in ids: what the model sampled after a prompt, or a conversation whole.

    The last message is there also when it was cut short, with what there was of it: see Parsed.
    role and strict as for Parser. Raises HarmonyError, a ValueError, if strict.
    """
    parser = Parser(tokenizer, role=role, strict=strict)
    parser.feed(ids)
    parser.finish()
    return parser.messages


def _author(word: str) -> tuple[str, dict[str, str]]:
    """`user`, `user:ada`, or a tool by its name."""
    role, _, name = word.partition(":")
    if role in ROLES and role != "tool":
        return role, {"name": name} if name else {}
    return "tool", {"name": word}
