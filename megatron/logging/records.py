"""train_log.jsonl: one JSON object per line, appended, readable after a kill at any moment.

Training lines have `iteration`, `loss` and the rest of a logged step; evaluation lines have `iteration` and
`valid_loss` or `test_loss`. Numbers that are not finite are written as null, because JSON has no NaN.
"""

import json
import math
import os
from typing import Any, Dict, List, Optional

FILE_NAME = "train_log.jsonl"


def run_folder(neox_args) -> Optional[str]:
    """Where a run keeps its files: log_dir, else save, else nowhere (None)."""
    return neox_args.log_dir or neox_args.save


class RunLog:
    """Appends records to `folder`/train_log.jsonl."""

    def __init__(self, folder: str):
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, FILE_NAME)
        self._file = open(self.path, "ab+")
        self._drop_torn_line()

    def write(self, record: Dict[str, Any]) -> None:
        """Append one line and hand it to the operating system at once."""
        line = json.dumps({key: _plain(value) for key, value in record.items()})
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _drop_torn_line(self) -> None:
        """A process killed while writing leaves half a line, which would swallow the next one."""
        self._file.seek(0)
        content = self._file.read()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            self._file.truncate(complete)
        self._file.seek(0, os.SEEK_END)


def read_records(path: str) -> List[Dict[str, Any]]:
    """The records of one run, each step and evaluation once.

    A run that was resumed from an earlier checkpoint has written some iterations again: a line of an earlier
    iteration than the one before it replaces all lines from there on, one of the same iteration and kind that line.
    """
    records: List[Dict[str, Any]] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break
            record = json.loads(line)
            iteration, kind = record["iteration"], _kind(record)
            if records and iteration < records[-1]["iteration"]:
                records = [r for r in records if r["iteration"] < iteration]
            else:
                records = [r for r in records if r["iteration"] != iteration or _kind(r) != kind]
            records.append(record)
    return records


def _kind(record: Dict[str, Any]) -> str:
    return next((key for key in ("loss", "valid_loss", "test_loss") if key in record), "")


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
