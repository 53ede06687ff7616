"""Files of a folder are moved from one content to another: all of them, or none."""

import contextlib
import os
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Tuple

from tools.neox_patch.checkout import PatchError

Moves = Dict[str, Tuple[Optional[str], Optional[str]]]
"""path -> (content now, content wanted); None: no file."""


def move(root: Path, moves: Moves) -> None:
    """Give every file the content wanted. After an error every file has its old content again, and the error is raised.

    New contents are written beside the files first, then renamed over them. Modes and owners are kept.
    """
    for path, (old, _) in moves.items():
        if content(root / path) != old:
            raise PatchError(f"{path} was changed by something else just now: nothing was written")
    try:
        _move(root, moves)
    except BaseException as error:
        try:
            _move(root, {path: (new, old) for path, (old, new) in moves.items() if content(root / path) == new})
            remove_temporaries(root, moves)
        except OSError as second:
            raise PatchError(f"{error}; and then {second}: run --revert once that is mended") from error
        raise


def _move(root: Path, moves: Moves) -> None:
    for path, (_, new) in moves.items():
        if new is not None:
            _write_beside(root / path, new)
    for path, (_, new) in moves.items():
        if new is not None:
            os.replace(_temporary(root / path), root / path)
        else:
            (root / path).unlink(missing_ok=True)


def put_new(file: Path, text: str) -> None:
    """Write one file, whole or not at all."""
    _write_beside(file, text)
    os.replace(_temporary(file), file)


def content(file: Path) -> Optional[str]:
    """The exact text of a file; None if there is none. What is not UTF-8 is equal to no text."""
    return file.read_bytes().decode("utf-8", errors="surrogateescape") if file.is_file() else None


def missing_folders(root: Path, paths: Iterable[str]) -> List[str]:
    """The folders that have to be made for files, outermost first."""
    found = {parent for path in paths for parent in Path(path).parents if not (root / parent).is_dir()}
    return [folder.as_posix() for folder in sorted(found)]


def remove_temporaries(root: Path, paths: Iterable[str]) -> None:
    """Take away what a run that was killed left beside the files."""
    for path in paths:
        _temporary(root / path).unlink(missing_ok=True)


def remove_empty(root: Path, folders: Iterable[str]) -> None:
    """Take away folders in which nothing is left but compiled modules, innermost first."""
    for folder in sorted(folders, reverse=True):
        compiled = root / folder / "__pycache__"
        if not any(file != compiled for file in (root / folder).glob("*")):
            for file in compiled.glob("*.pyc"):
                file.unlink()
        for place in (compiled, root / folder):
            with contextlib.suppress(OSError):  # not empty, or not there
                place.rmdir()


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.head_dim_patch")


def _write_beside(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(_temporary(file), "wb") as out:
        out.write(text.encode("utf-8", errors="surrogateescape"))
        out.flush()
        os.fsync(out.fileno())
    if file.exists():
        state = file.stat()
        with contextlib.suppress(PermissionError):  # only an administrator can write for another
            os.chown(out.name, state.st_uid, state.st_gid)
        os.chmod(out.name, state.st_mode & 0o7777)
