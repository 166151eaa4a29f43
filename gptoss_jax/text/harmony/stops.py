"""Which tokens end the assistant's turn."""

from collections.abc import Iterable

from gptoss_jax.text.tokenizer import Tokenizer

# Not <|end|>: it ends a message, and another message of the same turn follows.
TURN_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")


def stop_tokens(
    tokenizer: Tokenizer | None,
    config_eos: int | Iterable | None = None,
    generation_eos: int | Iterable | None = None,
) -> tuple[int, ...]:
    """Everything that anybody says ends a turn, each once, in this order.

    1. `<|return|>`, `<|call|>` and `<|endoftext|>` of the tokenizer, by name, where it has them;
    2. `eos_token_id` of config.json; 3. that of generation_config.json: an int, a list, or None.
    It is a union: a file that names fewer takes none of the others away.
    Raises ValueError where an eos is not a token id.
    """
    special = {} if tokenizer is None else tokenizer.special
    out = [special[name] for name in TURN_ENDS if name in special]
    for where, eos in (("config", config_eos), ("generation_config", generation_eos)):
        listed = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        for id in listed:
            if isinstance(id, bool) or not isinstance(id, int) or id < 0:
                raise ValueError(f"eos_token_id of {where} holds {id!r}, which is no token id.")
        out += listed
    return tuple(dict.fromkeys(out))
