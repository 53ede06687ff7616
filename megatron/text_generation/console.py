"""What a person sees while texts are generated. Only rank 0 prints."""

import unicodedata
from typing import Any, Dict

from megatron.text_generation.collective import is_rank_0


def show(text: str = "", **print_options) -> None:
    """Print on rank 0, at once."""
    if is_rank_0():
        print(text, flush=True, **print_options)


def readable(text: str) -> str:
    """`text` with control characters spelled out, because a terminal would act on what a model happens to generate."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else f"\\x{ord(character):02x}"
        for character in text
    )


def show_record(record: Dict[str, Any], number: int, count: int) -> None:
    """One prompt with its text, its length and its speed."""
    show(f"--- {number} of {count}: {_speed(record['length'], record['duration_seconds'])}")
    show(f"prompt: {_block(record['context'] or '(none)')}")
    show(f"text:   {_block('(none)' if record['text'] is None else record['text'])}")
    if record["message"]:
        show(f"note:   {record['message']}")


def show_summary(tokens: int, texts: int, seconds: float, cache_bytes: int) -> None:
    """Totals over all prompts, and what the KV cache took."""
    cache = f"KV cache of rank 0: {cache_bytes:,} bytes" if cache_bytes else "no KV cache (recompute)"
    show(f"=== {texts} text{'' if texts == 1 else 's'}, {_speed(tokens, seconds)}; {cache}")


def _block(text: str) -> str:
    """Lines after the first stand under it, to the right of the label."""
    return readable(text).replace("\n", "\n" + " " * 8)


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"


class LiveText:
    """Prints a text as it grows. Detokenizing token by token would break characters that span several tokens."""

    def __init__(self):
        self.shown = ""

    def update(self, text: str) -> None:
        """Print what is new in `text`; a last character that may still change is held back."""
        stable = text.rstrip("\N{REPLACEMENT CHARACTER}")
        if stable.startswith(self.shown):
            show(readable(stable[len(self.shown) :]), end="")
            self.shown = stable

    def finish(self, text: str) -> None:
        """Print the rest, or the whole text where it changed after being printed."""
        show(readable(text[len(self.shown) :] if text.startswith(self.shown) else "\n" + text))
