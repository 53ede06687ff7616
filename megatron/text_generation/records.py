"""What is kept of a finished text, and the JSON-lines file it goes to."""

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional

from megatron.errors import ConfigError
from megatron.text_generation.stream import StreamState

NOT_STARTED = "text generation did not start: the first token was the end of the text; try other settings or a prompt"
UNKNOWN_TOKEN = "a generated token is not in the tokenizer's vocabulary"


def make_records(neox_args, contexts: List[str], state: StreamState, seconds: float) -> List[Dict[str, Any]]:
    """One record per row of a finished stream: context, text, length (tokens), finished, message,
    duration_seconds and, with return_logits, logits (one list over the vocabulary for each token of the text)."""
    return [_record(neox_args, context, row, state, seconds) for row, context in enumerate(contexts)]


def _record(neox_args, context: str, row: int, state: StreamState, seconds: float) -> Dict[str, Any]:
    start, end = int(state.start_index[row]), int(state.end_index[row])
    tokens = state.tokens[row, start : end + 1].tolist()
    text = decode(neox_args, tokens)
    record = {
        "context": context,
        "text": text if tokens else None,
        "length": len(tokens),
        "finished": bool(state.is_done[row]),
        "message": _message(state, row, tokens, text),
        "duration_seconds": seconds,
    }
    if state.logits is not None:
        first = int(state.start_index.min())
        record["logits"] = state.logits[start - first : start - first + len(tokens), row].tolist()
    return record


def decode(neox_args, tokens: List[int]) -> Optional[str]:
    """The text of token ids; None if the tokenizer does not know one of them."""
    try:
        return neox_args.tokenizer.detokenize(tokens)
    except KeyError:
        return None


def _message(state: StreamState, row: int, tokens: List[int], text: Optional[str]) -> Optional[str]:
    if not tokens:
        return NOT_STARTED
    if text is None:
        return UNKNOWN_TOKEN
    limit = state.tokens.size(1)
    if not state.is_done[row] and int(state.end_index[row]) == limit - 1:
        return f"stopped at the context length, seq_length={limit}"
    return None


class JSONLinesFile:
    """A file of JSON records that appears under its name only when all of it is written.

    `open` it, write inside a `with` block: records go to a temporary file in the same folder, which takes the name at
    the end of the block. When the block fails it is removed and an earlier file of the name is left as it was.
    Without `open` (ranks other than 0, or path None) nothing is written.
    """

    def __init__(self, path: Optional[str]):
        self.path = None if path is None else Path(path)
        self._file = None

    def open(self) -> None:
        """Raises ConfigError, before anything is generated, if the file cannot be written."""
        if self.path is None:
            return
        if self.path.is_dir():
            raise ConfigError(f"sample_output_file={self.path} is a folder; name a file")
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            self._file = open(self._temporary, "w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"sample_output_file={self.path} cannot be written: {error.strerror}; name a file in an existing folder"
            ) from None

    def write(self, record: Dict[str, Any]) -> None:
        """Append one record as a line of ASCII JSON."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")

    def __enter__(self) -> "JSONLinesFile":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._file is None:
            return
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())  # the rename must not reach the disk before the text
        self._file.close()
        if kind is None:
            os.replace(self._temporary, self.path)
        else:
            self._temporary.unlink(missing_ok=True)
