"""Greetings, questions about the model itself, and questions it cannot answer."""

from split import draw

GREETINGS = (
    "Hello|Hi|Hey|Hello!|Hi!|Hi there|Good morning|Good evening|Hello there|hello|hi|Hey!|Good day"
).split("|")
GREETED = "Hello! Ask me a sum, to sort a list, or to count letters."
MADE_BY = (
    "I was trained by the gptoss_jax project on public-domain texts and generated conversations."
)
ABILITIES = (
    "I can add, subtract and multiply small numbers, sort and reverse lists, count letters, and "
    "call tools."
)
ABOUT = {
    "Who are you?|who are you|What are you?|What is your name?|What model are you?|"
    "Tell me about yourself.|Introduce yourself.": "I am the tiny example model of gptoss_jax. "
    "I can do sums, work on short lists and words, and call tools.",
    "What can you do?|Help|help|How can you help me?|What can I ask you?|"
    "What are you able to do?": ABILITIES,
    "Who made you?|Who trained you?|Who created you?|Where do you come from?": MADE_BY,
    "How are you?|How are you today?|how are you": "I am well, thank you. "
    "Ask me a sum, to sort a list, or to count letters.",
    "How big are you?|How many parameters do you have?|"
    "Are you a large model?": "I am tiny: a few million parameters.",
    "Thanks|Thank you|Thank you!|thanks|Thanks a lot|thx": "You are welcome.",
    "Bye|Goodbye|bye|See you|Good night": "Goodbye!",
    "Are you human?|Are you a robot?|Are you a person?": "No, I am a tiny language model.",
    "Yes|No|OK|ok|yes|no|Okay|test|Test": "All right. "
    "Ask me a sum, to sort a list, or to count letters.",
}
UNKNOWN = (
    "I am a tiny model and do not know that. "
    "I can do sums, work on short lists and words, and call tools."
)
ASKED = (
    "What is the capital of {p}?",
    "Where is {p}?",
    "Who wrote {p}?",
    "Why is the {w} {v}?",
    "Tell me a joke.",
    "Tell me a joke about {w}.",
    "Write a poem about {w}.",
    "Write a story about a {w}.",
    "What is {w}?",
    "What is a {w}?",
    "How do I {w} a {v}?",
    "Who is {p}?",
    "When did {p} die?",
    "How far is {p}?",
    "What is the meaning of life?",
    "Explain {w}.",
    "Explain {w} to a child.",
    "Who is the president of {p}?",
    "Translate {w} to French.",
    "What is the best {w}?",
    "Can you {w}?",
    "Do you like {w}?",
    "What do you think of {p}?",
    "Is {w} good?",
    "What happened in {n}?",
    "Write code for {w}.",
    "Write a python function to {w}.",
    "How does {w} work?",
    "Where can I buy {w}?",
    "What is the weather?",
    "What is the weather in {p}?",
    "What time is it?",
    "What is the time in {p}?",
    "Summarize {p}.",
    "Give me a recipe for {w}.",
    "I am {w}.",
    "I feel {w}.",
    "My {w} is {v}.",
)


class Talk:
    def __init__(self, words: list[str], places: list[str]):
        self.words, self.places = words, places

    def greet(self, rng, wanted=False):
        return (
            rng.choice(GREETINGS),
            {
                "low": "",
                "medium": "The user greets me.",
                "high": "The user greets me. I greet back.",
            },
            GREETED,
        )

    def about(self, rng, wanted=False):
        asked = rng.choice(list(ABOUT))
        return (
            rng.choice(asked.split("|")),
            {
                "low": "",
                "medium": "A short answer is enough.",
                "high": "The user talks to me. A short answer is enough.",
            },
            ABOUT[asked],
        )

    def unknown(self, rng, wanted=False):
        def make(r):
            place = r.choice(self.places) if r.random() < 0.6 else r.choice(self.words).capitalize()
            question = r.choice(ASKED).format(
                w=r.choice(self.words), v=r.choice(self.words), p=place, n=r.randrange(1000, 2030)
            )
            return (question,), question

        question = draw(rng, wanted, make)
        return (
            question,
            {
                "low": "",
                "medium": "I do not know this.",
                "high": "I do not know this. I say so, and what I can do.",
            },
            UNKNOWN,
        )
