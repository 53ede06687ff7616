"""Where prompts come from: a list, a file, or a person at the terminal."""

from pathlib import Path
from typing import List, Optional

from megatron.errors import ConfigError, DataError
from megatron.text_generation.stream import context_limit


def read_prompts(path: Optional[str], prompt_end: str = "\n") -> List[str]:
    """The prompts of a text file, which end with `prompt_end`; surrounding white space and empty prompts are dropped.

    Raises ConfigError if no file or no prompt_end is named, DataError if the file cannot be read or has no prompt.
    """
    if not path:
        raise ConfigError("sample_input_file is not set; text_gen_type=input-file reads its prompts from it")
    _check_prompt_end(prompt_end)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        raise DataError(f"sample_input_file={path}: {reason}; name a text file with one prompt per line") from None
    prompts = [prompt.strip() for prompt in text.split(prompt_end)]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise DataError(f"sample_input_file={path} holds no prompt; write one before each {prompt_end!r}")
    return prompts


def ask_prompt(prompt_end: str = "\n") -> Optional[str]:
    """Ask for a prompt at the terminal; lines are read until prompt_end is met. None at end of input (Ctrl-D).

    Raises ConfigError for an empty prompt_end.
    """
    _check_prompt_end(prompt_end)
    text = ""
    while prompt_end not in text:
        try:
            text += input("... " if text else "Prompt >>> ") + "\n"
        except EOFError:
            return None
    return text.split(prompt_end)[0]


def tokenize_prompt(neox_args, text: str, eos_token_id: int) -> List[int]:
    """Token ids of a prompt; the empty prompt is the end-of-text token, after which a new text begins.

    Raises DataError if it leaves no room for a new token.
    """
    tokens = [int(token) for token in neox_args.tokenizer.tokenize(text)] if text else []
    limit = context_limit(neox_args)
    if len(tokens) >= limit:
        raise DataError(
            f"a prompt of {len(tokens)} tokens leaves no room in seq_length={limit}; shorten it: {_beginning(text)!r}"
        )
    return tokens or [eos_token_id]


def _check_prompt_end(prompt_end: str) -> None:
    if not prompt_end:
        raise ConfigError(f'prompt_end={prompt_end!r} ends no prompt; set it to the text between prompts, e.g. "\\n"')


def _beginning(text: str, width: int = 40) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
