"""The errors a user can cause. Each message says setting=value, what is wrong, and what to do."""

from typing import Sequence, Union


class NeoXError(Exception):
    """Base of every error that is the user's to fix; entry points print it without a traceback.

    `problems` holds every one found, not only the first.
    """

    def __init__(self, problems: Union[str, Sequence[str]] = ""):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(_numbered(self.problems))


class ConfigError(NeoXError):
    """One or more settings cannot work."""


class DataError(NeoXError):
    """A data set, tokenizer or prompt file is missing, empty, truncated or of the wrong kind."""


class CheckpointError(NeoXError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class ConversionError(NeoXError):
    """A model cannot be represented in the format asked for."""


class BackendError(NeoXError):
    """An attention backend that was asked for cannot run this geometry, dtype or device."""


def _numbered(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]
    return f"{len(problems)} problems:\n" + "\n".join(lines)
