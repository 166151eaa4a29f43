"""Sums, differences and products, worked digit by digit in the analysis channel.

Every function returns (question, {"low" | "medium" | "high": analysis}, answer). Digits are worked
from the ones upwards, the order in which carries arise: each step then needs only what stands
directly before it.
"""

from split import draw, held_out

PLACES = ("Ones", "Tens", "Hundreds", "Thousands", "Ten thousands")

ADD = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "{a}+{b}=?",
    "What is {a}+{b}?",
    "what is {a} + {b}",
    "What's {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} and {b} together?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}",
    "Can you add {a} to {b}?",
    "What is the sum of {a} and {b}?",
    "I have {a} apples and get {b} more. How many do I have?",
)
SUBTRACT = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} = ?",
    "What is {a} minus {b}?",
    "Compute {a} - {b}.",
    "Subtract {b} from {a}.",
    "How much is {a} - {b}?",
    "What's {a} - {b}?",
    "I have {a} apples and give away {b}. How many are left?",
)
MULTIPLY = (
    "What is {a} * {b}?",
    "{a} * {b}",
    "{a}*{b}",
    "{a} x {b}",
    "What is {a} times {b}?",
    "What is {a} x {b}?",
    "Multiply {a} by {b}.",
    "Compute {a} * {b}.",
    "What's {a} times {b}?",
)


def digits(n: int, width: int) -> list[int]:
    """Lowest first, padded with zeros."""
    return [n // 10**i % 10 for i in range(width)]


def add_steps(a: int, b: int) -> tuple[str, str]:
    """(short, spelled out) workings of a + b."""
    width = max(len(str(a)), len(str(b)))
    short, long, carry = [], [], 0
    for place, x, y in zip(PLACES, digits(a, width), digits(b, width), strict=False):
        terms = f"{x} + {y}" + (f" + {carry}" if carry else "")
        total = x + y + carry
        carry = total // 10
        short.append(f"{terms} = {total}.")
        tail = f", write {total % 10}, carry 1." if carry else f", write {total % 10}."
        long.append(f"{place}: {terms} = {total}{tail}")
    if carry:
        long.append(f"{PLACES[width]}: 1.")
    return " ".join(short), " ".join(long)


def subtract_steps(a: int, b: int) -> tuple[str, str]:
    """Workings of a - b for a >= b."""
    width = len(str(a))
    short, long, borrow = [], [], 0
    for place, x, y in zip(PLACES, digits(a, width), digits(b, width), strict=False):
        taken = f" - {borrow}" if borrow else ""
        lent = x - borrow < y
        top = x + 10 if lent else x
        result = top - y - borrow
        borrow = int(lent)
        short.append(f"{top} - {y}{taken} = {result}.")
        tail = ", borrow 1." if lent else "."
        long.append(f"{place}: {top} - {y}{taken} = {result}{tail}")
    return " ".join(short), " ".join(long)


def levels(expression: str, short: str, long: str, answer, check: str) -> dict[str, str]:
    return {
        "low": f"{short} {answer}",
        "medium": f"{expression}. {long} Answer: {answer}",
        "high": f"The question is {expression}. {long} Answer: {answer}. Check: {check}.",
    }


def operand(rng) -> int:
    return rng.randrange(10 ** rng.choices((1, 2, 3), (2, 6, 3))[0])


def two_digits(rng) -> int:
    return rng.randrange(10, 100)


def add(rng, wanted=False, operand=operand, form=None):
    a, b = draw(rng, wanted, lambda r: (v := (operand(r), operand(r)), v))
    short, long = add_steps(a, b)
    answer = a + b
    expression = f"{a} + {b}"
    question = (form or rng.choice(ADD)).format(a=a, b=b)
    return (
        question,
        levels(expression, short, long, answer, f"{answer} - {b} = {a}"),
        f"{expression} = {answer}",
    )


def subtract(rng, wanted=False, operand=operand, form=None):
    """Held out by the sum that checks it, (a - b) + b = a, which is written at level "high"."""

    def make(r):
        a, b = operand(r), operand(r)
        return (abs(a - b), min(a, b)), (a, b)

    a, b = draw(rng, wanted, make)
    if a < b and rng.random() < 0.8:
        a, b = b, a
    expression, answer = f"{a} - {b}", a - b
    if a >= b:
        short, long = subtract_steps(a, b)
    else:
        short, long = subtract_steps(b, a)
        note = f"{b} is larger, so take {b} - {a} and negate."
        short, long = f"{note} {short}", f"{note} {long}"
    question = (form or rng.choice(SUBTRACT)).format(a=a, b=b)
    return (
        question,
        levels(expression, short, long, answer, f"{answer} + {b} = {a}"),
        f"{expression} = {answer}",
    )


def multiply(rng, wanted=False, form=None):
    while True:
        a, b = draw(rng, wanted, lambda r: (v := (r.randrange(100), r.randrange(10)), v))
        tens, ones = a // 10 * 10, a % 10
        # The working takes a apart and adds the products: training may not show a held-out sum.
        if wanted or not (held_out(tens, ones) or held_out(tens * b, ones * b)):
            break
    expression, answer = f"{a} * {b}", a * b
    if tens:
        short = f"{tens} * {b} = {tens * b}. {ones} * {b} = {ones * b}."
        steps, _ = add_steps(tens * b, ones * b)
        short = f"{short} {steps} {tens * b} + {ones * b} = {answer}."
        long = f"{a} = {tens} + {ones}. {short}"
    else:
        short, long = "", f"{a} * {b} = {answer}."
    if rng.random() < 0.3:
        a, b = b, a
        expression = f"{a} * {b}"
    question = (form or rng.choice(MULTIPLY)).format(a=a, b=b)
    return (
        question,
        levels(expression, short, long, answer, f"{b} * {a} = {answer}"),
        f"{expression} = {answer}",
    )


def compare(rng, wanted=False):
    a, b = draw(rng, wanted, lambda r: (v := (operand(r), operand(r)), v))
    if a == b:
        b += 1
    small = rng.random() < 0.4
    word = "smaller" if small else "larger"
    answer = min(a, b) if small else max(a, b)
    other = max(a, b) if small else min(a, b)
    sign = "<" if small else ">"
    question = rng.choice(
        (
            f"Which is {word}, {a} or {b}?",
            f"Which number is {word}: {a} or {b}?",
            f"What is the {word} of {a} and {b}?",
        )
    )
    sizes = f"{a} has {count(len(str(a)), 'digit')}, {b} has {count(len(str(b)), 'digit')}."
    steps = first_difference(a, b)
    return (
        question,
        {
            "low": f"{steps} {answer} {sign} {other}",
            "medium": f"{sizes} {steps} {answer} {sign} {other}",
            "high": f"Compare {a} and {b}. {sizes} {steps} {answer} {sign} {other}. "
            f"The {word} is {answer}.",
        },
        f"{answer} is {word} than {other}.",
    )


def parity(rng, wanted=False):
    (n,) = draw(rng, wanted, lambda r: (v := (operand(r),), v))
    kind = "odd" if n % 2 else "even"
    asked = rng.choice((f"Is {n} even or odd?", f"Is {n} odd or even?", f"Is the number {n} even?"))
    long = f"The last digit of {n} is {n % 10}, which is {kind}."
    return (
        asked,
        {
            "low": f"{n % 10} is {kind}",
            "medium": long,
            "high": f"A number is even if its last digit is. {long}",
        },
        f"{n} is {kind}.",
    )


def first_difference(a: int, b: int) -> str:
    """Numbers compared as one reads them: by length, then digit by digit from the left."""
    x, y = str(a), str(b)
    if len(x) != len(y):
        return f"{len(x)} {'>' if len(x) > len(y) else '<'} {len(y)}."
    steps = []
    for p, q in zip(x, y, strict=True):
        steps.append(f"{p} {'=' if p == q else '>' if p > q else '<'} {q}.")
        if p != q:
            break
    return " ".join(steps)


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
