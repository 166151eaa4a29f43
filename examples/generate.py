"""Two questions in one batch, answered:  python examples/generate.py [tiny | folder | name]"""

import sys

import gptoss_jax as gj

QUESTIONS = ["What is 27 + 58?", "What is 9 * 7?"]
path = sys.argv[1] if len(sys.argv) > 1 else "tiny"
model, tokenizer = gj.load(path), gj.Tokenizer.load(path)
prompts = [gj.harmony.render([{"role": "user", "content": q}], tokenizer) for q in QUESTIONS]
out = gj.generate(model, prompts, max_new_tokens=256, sampler=gj.Sampler(temperature=0.0))
for question, tokens, why in zip(QUESTIONS, out.tokens, out.finish_reasons, strict=True):
    answer = [m.content for m in gj.harmony.parse(tokens, tokenizer) if m.channel == "final"]
    print(f"{question} {' '.join(answer)} ({len(tokens)} tokens, {why})")
