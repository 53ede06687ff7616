"""What `--write` leaves in the checkout, in `.head_dim_patch/`: enough to take the patch back to the byte.

The folder ignores itself (a .gitignore in it), so git does not see it: who commits the patch has it in the history, and
other clones take it back with git.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from tools.neox_patch import moving
from tools.neox_patch.change import FILES, PROJECT
from tools.neox_patch.checkout import PatchError
from tools.neox_patch.text import lines_of

FOLDER = ".head_dim_patch"
NAME, DIFF, IGNORE = "record.json", "head_dim.diff", ".gitignore"
FORMAT = 1

DONE, WRITING, REVERTING = "done", "writing", "reverting"
"""state of a record: the last two are those of a run that was killed."""


@dataclass
class Record:
    """files: path -> (text before, None if the file was added; text after). folders: those that were made for them,
    outermost first. version: of the patch that was made."""

    files: Dict[str, Tuple[Optional[str], str]]
    folders: List[str] = field(default_factory=list)
    version: str = ""
    state: str = WRITING

    def save(self, root: Path) -> None:
        """Write it: whole, or not at all."""
        folder = root / FOLDER
        folder.mkdir(exist_ok=True)
        moving.put_new(folder / IGNORE, "*\n")
        files = {path: {"before": _packed(old), "after": _packed(new)} for path, (old, new) in self.files.items()}
        head = {"format": FORMAT, "version": self.version, "state": self.state, "folders": self.folders}
        moving.put_new(folder / NAME, json.dumps({**head, "files": files}, indent=1))

    def remove(self, root: Path) -> None:
        """Take the record away, and the folder unless earlier records are in it."""
        folder = root / FOLDER
        if not folder.is_dir():
            return
        moving.remove_temporaries(folder, (NAME, DIFF, IGNORE))
        others = {file.name for file in folder.iterdir()} - {NAME, DIFF, IGNORE}
        for name in (NAME, DIFF) if others else (NAME, DIFF, IGNORE):
            (folder / name).unlink(missing_ok=True)
        if not others:
            folder.rmdir()

    def set_aside(self, root: Path) -> Path:
        """Keep the record under another name: that of an earlier patch, whose files are no longer here."""
        folder = root / FOLDER
        number = next(n for n in range(1, 10**6) if not (folder / f"record.{n}.json").exists())
        return (folder / NAME).rename(folder / f"record.{number}.json")


def load(root: Path) -> Optional[Record]:
    """The record in a checkout, None if there is none. Raises PatchError if it cannot be read."""
    file = root / FOLDER / NAME
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise PatchError(f"{file} has format {data['format']}: use the version of this tool that wrote it")
        files = {path: (_unpacked(entry["before"]), _unpacked(entry["after"])) for path, entry in data["files"].items()}
        return Record(files, data["folders"], data["version"], data["state"])
    except (ValueError, KeyError, TypeError) as error:
        raise PatchError(
            f"{file} is damaged ({type(error).__name__}: {error}): take the patch back with git, and remove {FOLDER}"
        ) from None


def patch_version() -> str:
    """A short checksum of what the patch consists of, so that one made by another version is told apart."""
    here = Path(__file__).parent
    parts = [*here.glob("*.py"), *here.glob("changes/*.py"), *FILES.rglob("*")]
    parts += [PROJECT / "megatron/geometry.py", PROJECT / "megatron/errors.py"]
    digest = hashlib.sha256()
    for part in sorted(parts):
        if part.is_file() and part.suffix != ".pyc":
            digest.update(part.relative_to(PROJECT).as_posix().encode() + b"\0" + part.read_bytes())
    return digest.hexdigest()[:12]


def _packed(text: Optional[str]) -> Optional[dict]:
    return None if text is None else {"sha256": _sha256(text), "lines": lines_of(text)}


def _unpacked(entry: Optional[dict]) -> Optional[str]:
    if entry is None:
        return None
    text = "".join(entry["lines"])
    if _sha256(text) != entry["sha256"]:
        raise ValueError("a checksum differs")
    return text


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
