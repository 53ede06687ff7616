"""Makes a plan true, and takes it back. A run that is killed leaves a record from which the next one puts all back."""

import contextlib
import fcntl
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Iterator, List, Optional

from tools.neox_patch import moving, record
from tools.neox_patch.checkout import PatchError, check_writable
from tools.neox_patch.moving import Moves, content
from tools.neox_patch.plan import Plan
from tools.neox_patch.record import DONE, FOLDER, REVERTING, WRITING, Record


def write(root: Path, plan: Plan) -> None:
    """Write everything that is planned, and the record of it. After an error the checkout is as it was.

    Raises PatchError for files that cannot be replaced, or if anything was not found.
    """
    if plan.missing:
        raise PatchError(plan.missing)
    check_writable(root, [*plan.after, FOLDER])
    moves: Moves = {path: (plan.before[path], plan.after[path]) for path in plan.after}
    with _alone(root):
        earlier = record.load(root)
        if earlier is not None and not all_before(root, earlier):
            earlier.set_aside(root)
        folders = moving.missing_folders(root, moves)
        made = Record({path: (old, plan.after[path]) for path, (old, _) in moves.items()}, folders)
        made.version = record.patch_version()
        try:
            made.save(root)
            moving.move(root, moves)
            moving.put_new(root / FOLDER / record.DIFF, plan.diff())
            made.state = DONE
            made.save(root)
        except BaseException:
            _put_back(root, made)
            raise


def _put_back(root: Path, made: Record) -> None:
    """After an error: those files that have been written are taken back, the record with them."""
    moving.move(root, {path: (new, old) for path, (old, new) in made.files.items() if content(root / path) == new})
    moving.remove_empty(root, made.folders)
    made.remove(root)


def revert(root: Path, made: Record) -> List[str]:
    """Take back what a record tells of; the files that keep edits made since then are returned.

    Raises PatchError, having done nothing, if edits made since then would be lost.
    """
    moves, edited = _moves_back(root, made)
    check_writable(root, moves)
    with _alone(root):
        moving.remove_temporaries(root, made.files)
        state, made.state = made.state, REVERTING
        made.save(root)
        try:
            moving.move(root, moves)
        except BaseException:
            if all(content(root / path) == now for path, (now, _) in moves.items()):
                made.state = state
                made.save(root)
            raise
        _remove_compiled(root, [path for path, (_, new) in moves.items() if new is None])
        moving.remove_empty(root, made.folders)
        made.remove(root)
    return edited


def _moves_back(root: Path, made: Record):
    moves, edited, problems = {}, [], []
    for path, (before, after) in made.files.items():
        now = content(root / path)
        if now == before:
            continue
        if now != after:
            merged = _without_patch(path, now, after, before)
            if merged is None:
                problems.append(_how_by_hand(path, now, before))
                continue
            edited.append(path)
            moves[path] = (now, merged)
        else:
            moves[path] = (now, before)
    if problems:
        raise PatchError(problems)
    return moves, edited


def _how_by_hand(path: str, now: Optional[str], before: Optional[str]) -> str:
    if now is None:
        return f"{path} was removed since the patch: put it back (git checkout -- {path}), then --revert"
    if before is None:
        return f"{path} came with the patch and was edited since: move it elsewhere, then --revert"
    return (
        f"{path} was edited since the patch, in lines of the patch: take these edits out (the patch is in "
        f"{FOLDER}/{record.DIFF}; git apply -R --reject --include={path} {FOLDER}/{record.DIFF} does what it can), or "
        "commit them and take the patch back with git"
    )


def _without_patch(path: str, now: Optional[str], after: str, before: Optional[str]) -> Optional[str]:
    """The file with its later edits and without the patch (a three-way merge by git), None where they meet."""
    if now is None or before is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for name, text in (("now", now), ("after", after), ("before", before)):
            names.append(os.path.join(folder, name))
            Path(names[-1]).write_bytes(text.encode("utf-8", errors="surrogateescape"))
        try:
            merged = subprocess.run(["git", "merge-file", "-p", "-q", *names], capture_output=True)
        except FileNotFoundError:
            return None
    if merged.returncode:
        return None
    try:
        text = merged.stdout.decode("utf-8")
        if path.endswith(".py"):
            compile(text.removeprefix("\ufeff"), path, "exec", dont_inherit=True)
    except (UnicodeDecodeError, SyntaxError):
        return None
    return text


def all_before(root: Path, made: Record) -> bool:
    """Whether every file is as it was before the patch: it has been taken back by other means, say by git."""
    return all(content(root / path) == before for path, (before, _) in made.files.items())


def is_interrupted(made: Optional[Record]) -> bool:
    """Whether the run that wrote the record was killed."""
    return made is not None and made.state in (WRITING, REVERTING)


def _remove_compiled(root: Path, paths: List[str]) -> None:
    for path in map(Path, paths):
        for file in (root / path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            file.unlink()


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Raises PatchError if another run is writing to the checkout now."""
    folder = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(f"another run is writing to {root} now") from None
        except OSError:
            pass  # some network file systems have no locks
        yield
    finally:
        os.close(folder)
