"""Questions about a given word or list: spell, count letters, reverse, sort, pick."""

import json

from split import draw

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
FRUIT = (
    "apple banana cherry date elderberry fig grape lemon mango orange peach pear plum strawberry"
).split()
ANIMALS = (
    "ant bear cat dog elephant fox goat horse lion mouse owl pig rabbit sheep tiger wolf zebra"
).split()
COLOURS = "red green blue yellow black white brown pink purple orange grey".split()
OTHERS = (
    "table house river stone bread water paper window garden music letter banana mississippi"
).split()


def spelled(word: str) -> str:
    return " ".join(word)


class Words:
    """Question makers over a vocabulary; each gives (question, analysis by level, answer)."""

    def __init__(self, words: list[str]):
        self.words = words
        self.common = FRUIT + ANIMALS + COLOURS + OTHERS

    def word(self, rng) -> str:
        kind = rng.random()
        if kind < 0.25:
            return rng.choice(self.common)
        if kind < 0.9:
            return rng.choice(self.words)
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(3, 8)))

    def some_word(self, rng, wanted):
        return draw(rng, wanted, lambda r: ((w := self.word(r),), w))

    def count_letter(self, rng, wanted=False):
        word = self.some_word(rng, wanted)
        letter = rng.choice(word) if rng.random() < 0.85 else rng.choice("abcdefghilmnoprstuwy")
        n, marks = 0, []
        for c in word:
            n += c == letter
            marks.append(f"{c} {n}" if c == letter else c)
        question = rng.choice(
            (
                "How many times does the letter {l} occur in {w}?",
                'How many times does the letter "{l}" appear in "{w}"?',
                "How many {l}'s are in {w}?",
                "How many {l}s are in {w}?",
                "How many {l}'s are there in the word {w}?",
                'Count the letter {l} in "{w}".',
                "How many letters {l} are in {w}?",
            )
        ).format(l=letter, w=word)
        walk = " ".join(marks)
        times = {0: "does not occur", 1: "occurs once", 2: "occurs twice"}.get(
            n, f"occurs {n} times"
        )
        return (
            question,
            {
                "low": walk,
                "medium": f"{spelled(word)}. Counting {letter}: {walk}. So {n}.",
                "high": f"The word is {word}, spelled {spelled(word)}. "
                f"Counting {letter}: {walk}. So the count is {n}.",
            },
            f"The letter {letter} {times} in {word}."
            if n < 3
            else f"The letter {letter} occurs {n} times in {word}.",
        )

    def length(self, rng, wanted=False):
        word = self.some_word(rng, wanted)
        walk = " ".join(f"{c} {i}" for i, c in enumerate(word, 1))
        question = rng.choice(
            (
                "How many letters are in {w}?",
                'How many letters does "{w}" have?',
                "How long is the word {w}?",
            )
        ).format(w=word)
        return (
            question,
            {
                "low": walk,
                "medium": f"{spelled(word)}. {walk}.",
                "high": f"The word is {word}: {spelled(word)}. Numbered: {walk}. So {len(word)}.",
            },
            f"{word} has {len(word)} letters.",
        )

    def reverse(self, rng, wanted=False):
        word = self.some_word(rng, wanted)
        back = word[::-1]
        question = rng.choice(
            (
                "Reverse the word {w}.",
                'Reverse "{w}".',
                "Spell {w} backwards.",
                "Write {w} backwards.",
                "What is {w} spelled backwards?",
                "What is {w} in reverse?",
            )
        ).format(w=word)
        steps = f"{spelled(word)}. Backwards: {spelled(back)}."
        return (
            question,
            {
                "low": f"{spelled(word)}. {spelled(back)}",
                "medium": steps,
                "high": f"The word {word} is spelled {steps} Joined: {back}.",
            },
            back,
        )

    def spell(self, rng, wanted=False):
        word = self.some_word(rng, wanted)
        question = rng.choice(
            ("Spell {w}.", "Spell the word {w}.", 'How do you spell "{w}"?')
        ).format(w=word)
        out = "-".join(word)
        return (
            question,
            {
                "low": "",
                "medium": f"The letters of {word}.",
                "high": f"The letters of {word} in order: {spelled(word)}.",
            },
            out,
        )

    def end(self, rng, wanted=False):
        word = self.some_word(rng, wanted)
        first = rng.random() < 0.5
        which = "first" if first else "last"
        letter = word[0] if first else word[-1]
        question = rng.choice(
            ("What is the {o} letter of {w}?", 'What is the {o} letter in "{w}"?')
        ).format(o=which, w=word)
        return (
            question,
            {
                "low": spelled(word),
                "medium": f"{spelled(word)}. The {which} is {letter}.",
                "high": f"The word {word} is spelled {spelled(word)}. "
                f"The {which} letter is {letter}.",
            },
            f"The {which} letter is {letter}.",
        )

    def items(self, rng, wanted, numbers: bool, unique=True):
        def make(r):
            n = r.randrange(3, 7)
            if numbers:
                v = r.sample(range(100), n)
            else:
                pool = r.choice((FRUIT, ANIMALS, COLOURS, self.words))
                v = r.sample(pool, n)
            return v, v

        return draw(rng, wanted, make)

    def sort(self, rng, wanted=False):
        numbers = rng.random() < 0.7
        items = self.items(rng, wanted, numbers)
        down = numbers and rng.random() < 0.3
        ordered = sorted(items, reverse=down)
        given, result = joined(items), joined(ordered)
        if numbers:
            how = "from largest to smallest" if down else "from smallest to largest"
            question = rng.choice(
                (
                    f"Sort these numbers {how}: {given}",
                    f"Sort {given} {how}.",
                    f"Put {given} in order {how}.",
                )
            )
            if not down and rng.random() < 0.4:
                question = rng.choice((f"Sort {given}.", f"Sort these numbers: {given}"))
            picked = "largest" if down else "smallest"
        else:
            question = rng.choice(
                (
                    f"Sort these words: {given}",
                    f"Sort {given} alphabetically.",
                    f"Put these words in alphabetical order: {given}",
                )
            )
            picked = "earliest"
        steps, left = [], list(items)
        for item in ordered[:-1]:
            left.remove(item)
            steps.append(f"{picked} {item}, left {joined(left)}.")
        walk = " ".join(steps)
        return (
            question,
            {
                "low": walk,
                "medium": f"{walk} In order: {result}",
                "high": f"The list is {given}. {walk} In order: {result}.",
            },
            result,
        )

    def reverse_list(self, rng, wanted=False):
        items = self.items(rng, wanted, rng.random() < 0.5)
        given, result = joined(items), joined(items[::-1])
        question = rng.choice(
            (
                f"Reverse this list: {given}",
                f"Reverse the list {given}.",
                f"Write {given} in reverse order.",
            )
        )
        return (
            question,
            {
                "low": "",
                "medium": f"From the last to the first: {result}",
                "high": f"The list is {given}. From the last to the first: {result}.",
            },
            result,
        )

    def pick(self, rng, wanted=False):
        items = self.items(rng, wanted, rng.random() < 0.4)
        given = joined(items)
        i = rng.randrange(len(items))
        which = "last" if i == len(items) - 1 and rng.random() < 0.6 else ORDINALS[i]
        question = rng.choice(
            (
                f"What is the {which} item of this list: {given}?",
                f"Which is the {which} of {given}?",
                f"Here is a list: {given}. What is the {which} one?",
                f"Pick the {which} item: {given}",
            )
        )
        walk = " ".join(
            f"{n} {item}" + ("," if n < len(items) else "") for n, item in enumerate(items, 1)
        )
        return (
            question,
            {
                "low": walk,
                "medium": f"{walk}. The {which} is {items[i]}.",
                "high": f"The list is {given}. Numbered: {walk}. The {which} is {items[i]}.",
            },
            f"The {which} item is {items[i]}.",
        )

    def extreme(self, rng, wanted=False):
        items = self.items(rng, wanted, True)
        big = rng.random() < 0.6
        word = rng.choice(("largest", "biggest", "maximum") if big else ("smallest", "minimum"))
        question = rng.choice(
            (
                f"What is the {word} of {joined(items)}?",
                f"Which number is the {word}: {joined(items)}?",
                f"Find the {word} number in {joined(items)}.",
            )
        )
        best, walk = items[0], [str(items[0])]
        for item in items[1:]:
            best = max(best, item) if big else min(best, item)
            walk.append(str(best))
        answer = best
        return (
            question,
            {
                "low": " ".join(walk),
                "medium": f"Best so far: {', '.join(walk)}.",
                "high": f"The list is {joined(items)}. Best so far: {', '.join(walk)}. "
                f"The {word} is {answer}.",
            },
            f"The {word} is {answer}.",
        )

    def how_many(self, rng, wanted=False):
        items = self.items(rng, wanted, rng.random() < 0.4)
        given = joined(items)
        question = rng.choice(
            (
                f"How many items are in this list: {given}?",
                f"How many things are in {given}?",
                f"Count the items: {given}",
            )
        )
        walk = " ".join(
            f"{n} {item}" + ("," if n < len(items) else "") for n, item in enumerate(items, 1)
        )
        return (
            question,
            {
                "low": walk,
                "medium": f"{walk}. So {len(items)}.",
                "high": f"Number each item: {walk}. So there are {len(items)}.",
            },
            f"There are {len(items)} items.",
        )

    def repeat(self, rng, wanted=False):
        said = draw(
            rng,
            wanted,
            lambda r: (v := [self.word(r) for _ in range(r.randrange(1, 6))], " ".join(v)),
        )
        question = rng.choice(
            (
                "Say {s}.",
                'Say "{s}".',
                "Repeat after me: {s}",
                'Repeat: "{s}"',
                "Echo this: {s}",
                "Please say: {s}",
            )
        ).format(s=said)
        return (
            question,
            {
                "low": "",
                "medium": "The user wants me to repeat it.",
                "high": f"The user wants me to repeat: {said}",
            },
            said,
        )

    def as_json(self, rng, wanted=False):
        key, value = draw(rng, wanted, lambda r: (v := (self.word(r), self.word(r)), v))
        question = rng.choice(
            ("Write JSON with {k} set to {v}.", "Give me a JSON object with key {k} and value {v}.")
        ).format(k=key, v=value)
        return (
            question,
            {
                "low": "",
                "medium": f"Key {key}, value {value}.",
                "high": f"A JSON object. Key {key}, value {value}.",
            },
            json.dumps({key: value}),
        )


def joined(items) -> str:
    return ", ".join(map(str, items))
