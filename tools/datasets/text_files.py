"""Documents out of JSON-lines and plain text files, compressed or not."""

import glob
import gzip
import io
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Dict, Iterator, List, Sequence

from megatron.errors import DataError

LINES = (".jsonl", ".json")
PLAIN = (".txt", ".text")
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Document:
    """The texts of one record by key, and where it stood."""

    texts: Dict[str, str]
    place: str


def find_input_files(inputs: str) -> List[str]:
    """The files of a comma-separated list of files and folders (their readable files, by name).

    Raises DataError for a missing path, an unknown ending or a folder without such files.
    """
    found = []
    for path in inputs.split(","):
        if os.path.isdir(path):
            inside = [name for name in sorted(glob.glob(os.path.join(path, "*"))) if _kind(name)]
            if not inside:
                raise DataError(f"--input {path}: the folder has no {_endings()} files")
            found += inside
        elif not os.path.isfile(path):
            raise DataError(f"--input {path}: no such file")
        elif not _kind(path):
            raise DataError(f"--input {path}: files must end in {_endings()}")
        else:
            found.append(path)
    return found


def read_documents(path: str, keys: Sequence[str] = ("text",)) -> Iterator[Document]:
    """One Document for each line of a JSON-lines file, or one for a whole text file (its text under every key).

    Raises DataError with file and line for what cannot be read.
    """
    with _open_text(path) as stream:
        if _kind(path) == "plain":
            text = _read_all(stream, path)
            yield Document({key: text for key in keys}, path)
            return
        for number, line in _numbered_lines(stream, path):
            if line.strip():
                yield Document(_texts(line, keys, f"{path}:{number}"), f"{path}:{number}")


def _kind(path: str) -> str:
    """ "lines", "plain" or "" by the ending under any compression."""
    stem, ending = os.path.splitext(path)
    ending = os.path.splitext(stem)[1] if ending in COMPRESSED else ending
    return "lines" if ending in LINES else "plain" if ending in PLAIN else ""


def _endings() -> str:
    return f"{', '.join(LINES + PLAIN)} (each also with {' or '.join(COMPRESSED)})"


@contextmanager
def _open_text(path: str):
    """Bytes of a file, decompressed. Lines are decoded one by one, so that a bad one can be named."""
    if path.endswith(".zst"):
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{path} needs the package zstandard; `pip install zstandard`, or unpack it") from error
        with open(path, "rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            yield io.BufferedReader(stream)
    elif path.endswith(".gz"):
        with gzip.open(path, "rb") as stream:
            yield stream
    else:
        with open(path, "rb") as stream:
            yield stream


def _read_all(stream, path: str) -> str:
    return "".join(line for _, line in _numbered_lines(stream, path))


def _numbered_lines(stream, path: str):
    number = 0
    try:
        for number, line in enumerate(stream, 1):
            yield number, line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: not UTF-8 text ({error.reason} at byte {error.start} of the line)"
        ) from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged or truncated after line {number} ({error})") from error


def _texts(line: str, keys: Sequence[str], place: str) -> Dict[str, str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not a JSON record ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: a record must be a JSON object with the keys {list(keys)}")
    for key in keys:
        if not isinstance(record.get(key), str):
            problem = "is missing" if key not in record else f"is {type(record[key]).__name__}, not text"
            raise DataError(f"{place}: key {key!r} {problem}; choose keys with --jsonl-keys")
    return {key: record[key] for key in keys}
