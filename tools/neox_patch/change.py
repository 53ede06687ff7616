"""What the patch consists of: changes of files that are there, and files that are added.

A change is a function from a Source to edits of it. It finds its anchors both in a plain checkout and in one it has
been applied to; asking for an edit that is made already is no edit. What it cannot find it raises as AnchorNotFound.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, Optional

from tools.neox_patch.source import Source

FILES = Path(__file__).parent / "files"
PROJECT = Path(__file__).resolve().parents[2]


class Features:
    """What this state of GPT-NeoX has: some came after the oldest one that can be patched."""

    def __init__(self, root: Path):
        self.root = root

    def text(self, path: str) -> str:
        """A file of the checkout; empty if there is none."""
        file = self.root / path
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""

    @property
    def te_attention(self) -> bool:
        """Transformer Engine's attention can be asked for (te_mha), since December 2024."""
        return re.search(r"^\s+te_mha\s*:", self.text("megatron/neox_arguments/neox_args.py"), re.MULTILINE) is not None


@dataclass(frozen=True)
class Change:
    """One change of one file.

    path: relative to the checkout. summary: what it means for the user, a short line. edit: asks for the edits.
    wanted: whether this state of GPT-NeoX has what the change is about; None: always.
    """

    path: str
    summary: str
    edit: Callable[[Source], None]
    wanted: Optional[Callable[[Features], bool]] = None


@dataclass(frozen=True)
class TextChange:
    """One change of a file that is not Python: `edit` takes its text and returns the new one.

    Raises AnchorNotFound, as the edits of a Change do; applied twice it changes nothing.
    """

    path: str
    summary: str
    edit: Callable[[str], str]
    wanted: Optional[Callable[[Features], bool]] = None


@dataclass(frozen=True)
class AddedFile:
    """A file of ours that is placed in the checkout as it is. origin: where it is in this project."""

    path: str
    summary: str
    origin: Path
    wanted: Optional[Callable[[Features], bool]] = None

    def content(self) -> str:
        """The text of the file."""
        return self.origin.read_text(encoding="utf-8")


def added(path: str, summary: str) -> AddedFile:
    """A file that `files/` holds under the path that it will have in the checkout."""
    return AddedFile(path, summary, FILES / path)


@dataclass
class Patch:
    """All changes and added files, in the order in which they are told."""

    changes: List[Change] = field(default_factory=list)
    texts: List[TextChange] = field(default_factory=list)
    files: List[AddedFile] = field(default_factory=list)
