"""The checkout that is to be patched: whether it is one, and whether its files may be written."""

import ast
import os
import subprocess
from pathlib import Path
from typing import Iterable, List, Optional

from megatron.errors import NeoXError

ARGUMENTS = "megatron/neox_arguments/neox_args.py"
NEEDED = (ARGUMENTS, "megatron/neox_arguments/arguments.py", "megatron/model/transformer.py")
OURS = "megatron/head_dim/config.py"
"""A file that only this patch adds."""
SHOWN = 10


class PatchError(NeoXError):
    """A checkout cannot be patched, or the patch cannot be taken back."""


def checkout_root(path: str) -> Path:
    """The folder `path`, if it is the root of a GPT-NeoX checkout.

    Raises PatchError saying what is missing, and which folder is the root if `path` is inside of one.
    """
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise PatchError(f"PATH={path}: no such folder")
    missing = _missing(folder)
    if not missing:
        return folder
    around = next((parent for parent in folder.parents if not _missing(parent)), None)
    if around is not None:
        raise PatchError(f"PATH={path} is inside of a GPT-NeoX checkout: give its root, {around}")
    if (folder / "megatron/geometry.py").is_file() and (folder / "tools/neox_patch").is_dir():
        raise PatchError(f"PATH={path} is this project, which has head_dim; give the path of a GPT-NeoX checkout")
    raise PatchError(f"PATH={path} is no GPT-NeoX checkout: {', '.join(missing)} not found in it")


def _missing(folder: Path) -> List[str]:
    return [path for path in NEEDED if not (folder / path).is_file()]


def is_touched(root: Path) -> bool:
    """Whether any part of the patch, or a head_dim of another origin, is there."""
    return (root / OURS).is_file() or has_argument(root)


def has_argument(root: Path) -> bool:
    """Whether the class NeoXArgsModel has the field head_dim."""
    try:
        tree = ast.parse((root / ARGUMENTS).read_bytes())
    except (SyntaxError, ValueError):
        return False  # the plan says so
    fields = [
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "NeoXArgsModel"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return "head_dim" in fields


def check_no_other_head_dim(root: Path) -> None:
    """Raises PatchError if the checkout has a head_dim that this patch did not bring."""
    if has_argument(root) and not (root / OURS).is_file():
        raise PatchError(
            f"NeoXArgsModel in {ARGUMENTS} has a head_dim already, and {OURS} of this patch is not there: a head_dim "
            "of its own cannot be patched over; if it is this patch, put its added files back (git status)"
        )


def check_writable(root: Path, paths: Iterable[str]) -> None:
    """Raises PatchError naming every file that cannot be replaced: links, and what is read-only."""
    problems = [problem for path in paths for problem in [_unwritable(root, path)] if problem]
    if problems:
        raise PatchError(problems)


def _unwritable(root: Path, path: str) -> Optional[str]:
    file = root / path
    if file.resolve() != file:
        return f"{path} is, or is behind, a symbolic link to {file.resolve()}: patch the checkout that it belongs to"
    if file.exists() and not (os.access(file, os.W_OK) and file.stat().st_mode & 0o222):
        return f"{path} is read-only: chmod u+w it"
    folder = next(parent for parent in file.parents if parent.exists())
    if not os.access(folder, os.W_OK):
        return f"{folder} is read-only, so {path} cannot be replaced in it"
    return None


def git(root: Path, *arguments: str) -> Optional[subprocess.CompletedProcess]:
    """Run git in the checkout; None if there is no git."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment.update(GIT_OPTIONAL_LOCKS="0", LC_ALL="C")
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        return None


def under_git(root: Path) -> bool:
    """Whether git keeps the checkout's files: not so for a downloaded archive.

    Raises PatchError if there is a repository that git does not read.
    """
    answer = git(root, "ls-files", "--", ARGUMENTS)
    if answer is not None and answer.returncode == 0:
        return bool(answer.stdout)
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return False
    reason = "there is no git command" if answer is None else answer.stderr.strip()
    raise PatchError(f"whether {root} has uncommitted changes is not known ({reason}): --allow-dirty goes on without")


def check_clean(root: Path) -> None:
    """Raises PatchError naming tracked files with uncommitted changes; untracked files do not matter."""
    if not under_git(root):
        return
    answer = git(root, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", "--", ".")
    if answer is None or answer.returncode:
        raise PatchError(f"git status in {root}: {answer.stderr.strip() if answer else 'no git'}; or use --allow-dirty")
    changed = [line[3:] for line in answer.stdout.split("\0") if line]
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise PatchError(
            f"uncommitted changes in {', '.join(changed[:SHOWN])}{more}: commit or stash them, so that the patch can "
            "be told from them, or use --allow-dirty"
        )
