"""What a checkpoint consists of, without its numbers: file names, nested keys in order, types, shapes."""

from pathlib import Path
from typing import Any, Dict

import torch

NOT_COMPARED = ("ds_config", "ds_version")
"""DeepSpeed's copy of the configuration it was given, and its own version."""
LONG = 400
"""A sequence of at least this length (the states of random generators) is only named."""


def kinds(value: Any) -> Any:
    """Nested keys, types, dtypes and shapes, in a form that JSON can hold."""
    if isinstance(value, dict):
        return {str(key): kinds(each) for key, each in value.items() if key not in NOT_COMPARED}
    if isinstance(value, torch.Size):
        return f"shape {list(value)}"
    if isinstance(value, (list, tuple)) and len(value) < LONG:
        return [type(value).__name__, *map(kinds, value)]
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def of_checkpoint(root: Path, tag: str) -> Dict[str, Any]:
    """{"beside": names in the save folder, "files": {name in the checkpoint's folder: kinds, None if no .pt}}."""
    files = {
        path.name: kinds(torch.load(path, weights_only=False)) if path.suffix == ".pt" else None
        for path in sorted((root / tag).iterdir())
    }
    return {"beside": sorted(path.name for path in root.iterdir() if path.name != tag), "files": files}


def with_order(value: Any) -> Any:
    """As `kinds` gives it, but so that two dicts are equal only if their keys are in the same order too."""
    if isinstance(value, dict):
        return [(key, with_order(each)) for key, each in value.items()]
    return [with_order(each) for each in value] if isinstance(value, list) else value
