"""Declarations of functions as users write them: many names, descriptions and parameters.

With few verbs and attributes a small model learns names by heart and calls find_price where
get_price was offered. Here two names in five end in a word drawn from thousands, of which a tenth
never occurs in training, so that copying what was declared is all that helps.
"""

import dataclasses

from split import held_out

NUMBER, WORD, PHRASE = "number", "word", "phrase"
# attribute asked for -> (what it is asked of, how the result's value is made)
ATTRIBUTES = {
    "weather": ("city", PHRASE),
    "temperature": ("city", NUMBER),
    "time": ("city", NUMBER),
    "population": ("city", NUMBER),
    "price": ("item", NUMBER),
    "stock": ("item", NUMBER),
    "weight": ("item", NUMBER),
    "colour": ("item", WORD),
    "size": ("item", NUMBER),
    "owner": ("item", WORD),
    "age": ("person", NUMBER),
    "address": ("person", PHRASE),
    "job": ("person", WORD),
    "phone": ("person", NUMBER),
    "email": ("person", WORD),
    "score": ("player", NUMBER),
    "rank": ("player", NUMBER),
    "team": ("player", WORD),
    "author": ("book", WORD),
    "length": ("book", NUMBER),
    "meaning": ("word", PHRASE),
    "translation": ("word", WORD),
    "status": ("order", PHRASE),
    "total": ("order", NUMBER),
}
# what a function may call the parameter
PARAMETERS = {
    "city": ("city", "city", "location", "place"),
    "item": ("item", "item", "product", "name"),
    "person": ("person", "name"),
    "player": ("player", "name"),
    "book": ("book", "title"),
    "word": ("word", "word", "text"),
    "order": ("order", "order_id", "id"),
}
VERBS = (
    "get get get get_current find fetch read show check query load look_up lookup search describe "
    "retrieve tell"
).split()


@dataclasses.dataclass(frozen=True)
class Attribute:
    """word: as it is asked for. of: of what. value: how a result is made."""

    word: str
    of: str
    value: str


class Functions:
    def __init__(self, words: list[str]):
        fit = [w for w in words if 4 <= len(w) <= 9 and w not in ATTRIBUTES and w not in PARAMETERS]
        self.seen = [w for w in fit if not held_out("attribute", w)]
        self.unseen = [w for w in fit if held_out("attribute", w)]

    def attribute(self, rng, unseen=False) -> Attribute:
        """unseen: a word that names no function in training."""
        if unseen or rng.random() < 0.4:
            word = rng.choice(self.unseen if unseen else self.seen)
            return Attribute(word, rng.choice(list(PARAMETERS)), rng.choice((NUMBER, WORD, PHRASE)))
        word = rng.choice(list(ATTRIBUTES))
        return Attribute(word, *ATTRIBUTES[word])

    def lookup(self, rng, about: Attribute) -> dict:
        """A function that tells one attribute of one thing."""
        what, of = about.word, about.of
        verb, style = rng.choice(VERBS), rng.random()
        if style < 0.76:
            name = f"{verb}_{what}"
        elif style < 0.84:
            name = f"{of}_{what}"
        elif style < 0.92:
            name = f"{verb}_{of}_{what}"
        else:
            name = f"{verb.replace('_', '')}{what.capitalize()}"
        one = f"an {of}" if of[0] in "aeiou" else f"a {of}"
        described = rng.choice(
            (
                f"Get the {what} of {one}.",
                f"Get the {what} of {one}.",
                f"Tells the {what} of one {of}.",
                f"The {what} of {one}",
                f"Returns the {what} for {one}.",
                f"Look up the {what} of the {of}",
                f"Current {what} of {one}.",
            )
        )
        parameter = {"type": "string"}
        if rng.random() < 0.4:
            parameter["description"] = f"Name of the {of}"
        return function(name, described, {rng.choice(PARAMETERS[of]): parameter})

    def add(self, rng) -> dict:
        a, b = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")))
        return function(
            rng.choice(("add", "add_numbers", "sum", "sum_numbers", "add_two", "plus")),
            rng.choice(("Add two numbers.", "The sum of two numbers.", "Adds numbers")),
            {a: {"type": "number"}, b: {"type": "number"}},
        )

    def timer(self, rng) -> dict:
        return function(
            rng.choice(("set_timer", "start_timer", "create_timer", "timer", "new_timer")),
            rng.choice(("Set a timer.", "Starts a timer.", "Create a timer")),
            {rng.choice(("minutes", "minutes", "duration")): {"type": "integer"}},
        )

    def send(self, rng) -> dict:
        return function(
            rng.choice(("send_message", "send_text", "send", "write_message", "message_person")),
            rng.choice(("Send a message to a person.", "Sends a message.", "Write a message")),
            {
                rng.choice(("to", "to", "person")): {"type": "string"},
                rng.choice(("text", "text", "message")): {"type": "string"},
            },
        )


def quoted(tool: dict, word: str) -> str:
    """A function's declaration as the prompt has it, from `word` in its description to its name.

    The verb of get_price stands before the word that tells it from find_size. A model this small
    picks the wrong one if it has to say the name at once (84 % of calls right); copied from the
    description on, every token follows from the one before.
    """
    described = tool.get("description", "")
    if not described:
        return f"type {tool['name']}"
    return f"{described[described.index(word) :]}\ntype {tool['name']}"


def function(name: str, description: str, properties: dict) -> dict:
    """A function as the Harmony renderer takes it: name, description, JSON schema."""
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }
