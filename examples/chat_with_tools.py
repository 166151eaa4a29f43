"""The model may call a function of ours, and answers with what it returned.

python examples/chat_with_tools.py "What is the weather in Paris?" --model openai/gpt-oss-20b
"""

import argparse
import json

import gptoss_jax as gj
from gptoss_jax.text.harmony import Message


def get_weather(city: str) -> dict:
    return {"weather": "light rain" if city == "Oslo" else "sunny and warm"}


GREEDY = gj.Sampler(temperature=0.0)
FUNCTIONS = {"functions.get_weather": get_weather}
TOOLS = [
    {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]


def run(call: Message) -> Message:
    """What the function returned. The model wrote the call, so whatever is wrong is told to it."""
    try:
        result = FUNCTIONS[call.recipient](**json.loads(call.content))
    except (KeyError, TypeError, ValueError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    return Message("tool", json.dumps(result), "commentary", "assistant", name=call.recipient)


def converse(model, tokenizer, messages: list, *, max_new_tokens: int, max_calls: int = 4) -> list:
    """The conversation, continued until the model has answered or the tokens have run out."""
    for _ in range(max_calls + 1):
        prompt = gj.harmony.render(messages, tokenizer, tools=TOOLS)
        out = gj.generate(model, [prompt], max_new_tokens=max_new_tokens, sampler=GREEDY)
        reply = gj.harmony.parse(out.tokens[0], tokenizer)
        messages = [*messages, *reply]
        # A call that was cut short is no call, however much of it is there.
        if out.finish_reasons[0] != "stop" or not reply or reply[-1].recipient is None:
            break
        messages.append(run(reply[-1]))
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the weather in Paris?")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()
    model, tokenizer = gj.load(args.model), gj.Tokenizer.load(args.model)
    messages = [Message("user", args.question)]
    for message in converse(model, tokenizer, messages, max_new_tokens=args.max_new_tokens):
        to = f" to {message.recipient}" if message.recipient else ""
        print(f"[{message.channel or message.role}{to}] {message.content}")


if __name__ == "__main__":
    main()
