"""Texts as tokens for evaluation: special tokens at the beginning, and windows over a long text."""

from typing import List, Optional, Sequence, Tuple

from megatron.errors import ConfigError

Window = Tuple[List[int], List[int]]
"""A context and the tokens after it that are scored."""


def added_tokens(tokenizer) -> List[int]:
    """What the tokenizer puts before every text, such as Llama's <s>; usually nothing."""
    return [int(token) for token in tokenizer.tokenize("")]


def encode(tokenizer, text: str, special: bool = True) -> List[int]:
    """Token ids of a text, with or without what the tokenizer puts before every text; never with it twice."""
    tokens, added = [int(token) for token in tokenizer.tokenize(text)], added_tokens(tokenizer)
    size = len(added)
    if size and tokens[:size] == added and (not special or tokens[size : 2 * size] == added):
        return tokens[size:]
    return tokens


def first_context(tokenizer) -> int:
    """The token after which a text begins: the last that the tokenizer puts before every text, or the one between
    documents."""
    return (added_tokens(tokenizer) or [tokenizer.eod])[-1]


def rolling_windows(tokens: Sequence[int], first: int, length: int, stride: Optional[int] = None) -> List[Window]:
    """Windows over a text of any length in which every token is scored once, given `first` as the token before it.

    No window feeds more than `length` tokens to the model. The first one scores the first `length` tokens; each
    further one the next `stride` (default: `length`, with as few windows as possible), all after as much context as
    fits: at least length - stride + 1 tokens, and exactly that before the first token scored.
    Raises ConfigError for a stride outside 1 .. length.
    """
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise ConfigError(f"perplexity_stride={stride} must be from 1 to the context length, {length}")
    fed = [first, *tokens]  # fed[i] is the token before tokens[i]
    windows, done = [], 0
    while done < len(tokens):
        end = min(done + (stride if done else length), len(tokens))
        start = max(0, end - length)
        windows.append((fed[start : done + 1], list(tokens[done:end])))
        done = end
    return windows
