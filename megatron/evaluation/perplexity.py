"""Loss, perplexity and bits per byte of any text, without the evaluation harness."""

import math
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from megatron.errors import DataError
from megatron.evaluation.scoring import score
from megatron.evaluation.text import encode, first_context, rolling_windows
from megatron.text_generation.stream import context_limit


def read_text(path: str) -> str:
    """The text of a UTF-8 file, line ends as they are. Raises DataError if it cannot be read or is empty."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        raise DataError(f"perplexity_file={path}: {reason}; name a text file") from None
    if not text:
        raise DataError(f"perplexity_file={path} is empty; name a file with text")
    return text


def text_perplexity(
    neox_args, text: str, scores: Callable[[list], list], stride: Optional[int] = None
) -> Dict[str, Any]:
    """The figures of one text, read as one document that begins after the end-of-text token.

    scores: pairs of token ids (context, continuation) -> (log-probability, greedy) of each, as `scoring.score`.
    A text beyond the context length is scored in windows: see `text.rolling_windows`. A smaller stride gives each
    token more context, a lower loss, and takes length / stride times as long.
    Result: loss (nats per token), perplexity (its exponential), bits_per_byte (of the text's UTF-8 form, so it does
    not depend on the tokenizer), tokens, bytes, windows,
    context_length, stride.
    """
    length = context_limit(neox_args)
    tokens = encode(neox_args.tokenizer, text, special=False)
    if not tokens:
        raise DataError("the text has no tokens; name a longer one")
    windows = rolling_windows(tokens, first_context(neox_args.tokenizer), length, stride)
    nats = -math.fsum(total for total, _ in scores(windows))
    size = len(text.encode("utf-8"))
    return {
        "loss": nats / len(tokens),
        "perplexity": math.exp(min(nats / len(tokens), 700.0)),
        "bits_per_byte": nats / math.log(2) / size,
        "tokens": len(tokens),
        "bytes": size,
        "windows": len(windows),
        "context_length": length,
        "stride": length if stride is None else stride,
    }


def file_perplexity(neox_args, model, path: str, stride: Optional[int] = None, batch_size: int = 1) -> Dict[str, Any]:
    """`text_perplexity` of a file, for use from Python. All ranks call it and read the same file."""
    return text_perplexity(
        neox_args, read_text(path), lambda windows: score(neox_args, model, windows, batch_size), stride
    )
