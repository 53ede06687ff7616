"""Texts of the checkout, to the byte. What is edited has line ends of one kind and no byte order mark; what is written
has those of the file again.
"""

import difflib
from pathlib import Path
from typing import List

from tools.neox_patch.source import AnchorNotFound

MARK = "\ufeff"
"""A byte order mark: some editors put it before the first character."""


def read_exact(file: Path, path: str) -> str:
    """A file with its line ends and byte order mark as they are. Raises AnchorNotFound if it is not UTF-8."""
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise AnchorNotFound(f"{path} is not UTF-8 text (byte {error.start})") from None


def editable(exact: str) -> str:
    """The text with "\\n" at line ends and without a byte order mark."""
    return exact.removeprefix(MARK).replace("\r\n", "\n")


def in_style_of(exact: str, edited: str) -> str:
    """`edited` with the byte order mark and line ends of `exact`: lines that are kept keep theirs, new ones get the
    file's most frequent."""
    mark = MARK if exact.startswith(MARK) else ""
    exact = exact.removeprefix(MARK)
    windows = exact.count("\r\n")
    if not windows:
        return mark + edited
    if windows == exact.count("\n"):
        return mark + edited.replace("\n", "\r\n")
    before, after = lines_of(exact), lines_of(edited)
    end = "\r\n" if 2 * windows > len(before) else "\n"
    plain = [line.replace("\r\n", "\n") for line in before]
    pieces: List[str] = []
    for kind, start, stop, first, last in difflib.SequenceMatcher(None, plain, after, autojunk=False).get_opcodes():
        kept = before[start:stop] if kind == "equal" else [line.replace("\n", end) for line in after[first:last]]
        pieces += kept
    return mark + "".join(pieces)


def lines_of(text: str) -> List[str]:
    """The lines with their ends, as git counts them: "\\n" ends a line, nothing else does."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
