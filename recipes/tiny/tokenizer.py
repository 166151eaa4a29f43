"""Trains the tiny model's tokenizer: byte-level BPE, single digits, Harmony's tokens by name."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

# Their order is that of the published vocabulary, where they also stand last.
CONTROL = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
    "<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|endofprompt|>",
)  # fmt: skip
# Words with their space, every digit alone (sums are worked digit by digit), punctuation, blanks.
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def train(texts, vocab: int) -> tokenizers.Tokenizer:
    """texts: strings in the proportions of use. vocab: ids in all, control tokens included."""
    tokenizer = blank(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    add_controls(tokenizer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, not {vocab}: more text is needed"
        )
    return tokenizer


def letters() -> tokenizers.Tokenizer:
    """The same without merges: a token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = blank(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    add_controls(tokenizer)
    return tokenizer


def blank(model) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_controls(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, normalized=False, special=True) for name in CONTROL]
    )
