"""The folders of a run's checkpoints, and the order of steps that makes a kill at any moment harmless.

    save/latest               the name of the folder to load, replaced last and in one step
    save/global_step<N>/      a complete checkpoint
    save/.saving_<tag>/       being written
    save/.replaced_<tag>/     the older checkpoint of the same iteration, until the newer one has its place
    save/.removed_<tag>/      being deleted

A folder gets a loadable name only when everything in it is on the disk. All functions that write are for rank 0.
"""

import glob
import os
import re
import shutil
from typing import List, Optional

from megatron.errors import CheckpointError

LATEST = "latest"
_SAVING, _REPLACED, _REMOVED = ".saving_", ".replaced_", ".removed_"
_TAG = re.compile(r"global_step(\d+)")


def tag_of(iteration: int) -> str:
    """GPT-NeoX's folder name."""
    return f"global_step{iteration}"


def saving_tag(iteration: int) -> str:
    """The folder's name while it is written."""
    return _SAVING + tag_of(iteration)


def iterations_in(root: str) -> List[int]:
    """Iterations of the checkpoints under a folder, ascending."""
    if not os.path.isdir(root):
        return []
    names = [name[len(_REPLACED) :] if name.startswith(_REPLACED) else name for name in os.listdir(root)]
    return sorted({int(match.group(1)) for match in map(_TAG.fullmatch, names) if match})


def find_checkpoint(root: str, iteration: Optional[int] = None) -> Optional[str]:
    """The folder of an iteration, else of what `latest` names, else of the newest iteration; None if there is none.

    Raises CheckpointError if the iteration, or what `latest` names, is not there.
    """
    if iteration is not None:
        return _existing(root, tag_of(iteration), f"iteration={iteration}")
    latest = os.path.join(root, LATEST)
    if os.path.isfile(latest):
        with open(latest) as file:
            tag = file.read().strip()
        if not tag or os.path.basename(tag) != tag or tag in (".", ".."):
            raise CheckpointError(f"{latest} holds {tag!r}, which is not the name of a folder beside it")
        return _existing(root, tag, f"{latest} names {tag}")
    available = iterations_in(root)
    if not available and os.path.isdir(root) and any(name.endswith("model_states.pt") for name in os.listdir(root)):
        raise CheckpointError(f"{root} is itself a checkpoint: name the folder it is in, and choose it with iteration")
    return _existing(root, tag_of(available[-1]), root) if available else None


def refuse_patterns(setting: str, root: str) -> None:
    """DeepSpeed looks for files with glob, which takes [, * and ? in the folder's own name for a pattern.

    Raises CheckpointError if the name has one of them.
    """
    if glob.escape(root) != root:
        raise CheckpointError(f"{setting}={root} has one of the characters [ * ? in it; give the folder another name")


def recover(root: str) -> None:
    """Undo or finish what a killed save left in the middle."""
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if name.startswith(_REPLACED) and not os.path.exists(os.path.join(root, name[len(_REPLACED) :])):
            os.rename(path, os.path.join(root, name[len(_REPLACED) :]))
        elif name.startswith((_SAVING, _REPLACED, _REMOVED)):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def publish(root: str, iteration: int) -> None:
    """Give a finished `.saving_` folder its name, then point `latest` to it.

    A checkpoint of the same iteration steps aside first; find_checkpoint accepts it under the name it has meanwhile.
    """
    tag = tag_of(iteration)
    finished, target, aside = (os.path.join(root, prefix + tag) for prefix in (_SAVING, "", _REPLACED))
    sync_folder(finished)
    if os.path.exists(target):
        os.rename(target, aside)
    os.rename(finished, target)
    sync_folder(root)
    _write_latest(root, tag)
    shutil.rmtree(aside, ignore_errors=True)


def remove_old(root: str, keep: int, newest: int) -> List[int]:
    """Delete all but the `keep` newest checkpoints and return their iterations. The one just saved always stays."""
    others = [iteration for iteration in iterations_in(root) if iteration != newest]
    doomed = others[: max(0, len(others) - max(keep - 1, 0))]
    for iteration in doomed:
        removed = os.path.join(root, _REMOVED + tag_of(iteration))
        os.rename(os.path.join(root, tag_of(iteration)), removed)
        shutil.rmtree(removed, ignore_errors=True)
    return doomed


def sync_folder(path: str) -> None:
    """Put a folder's list of names on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_latest(root: str, tag: str) -> None:
    temporary = os.path.join(root, _SAVING + LATEST)
    with open(temporary, "w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(root, LATEST))
    sync_folder(root)


def _existing(root: str, tag: str, asked: str) -> str:
    for name in (tag, _REPLACED + tag):
        if os.path.isdir(os.path.join(root, name)):
            return os.path.join(root, name)
    available = ", ".join(map(str, iterations_in(root))) or "none"
    raise CheckpointError(f"{asked}, but {os.path.join(root, tag)} does not exist; iterations available: {available}")
