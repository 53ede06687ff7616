"""Configs as the commands read them: YAML files merged as for training, without a tokenizer or data."""

import os
from typing import Any, Dict, Sequence

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.loading import load_files

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")
CONFIG_JSON = "config.json"


def values_of(files: Sequence[str]) -> Dict[str, Any]:
    """The settings of some YAML files, merged. Raises ConfigError."""
    folder = next(filter(os.path.isdir, files), None)
    if folder is not None:
        hint = _FROM_HF.format(folder) if os.path.exists(os.path.join(folder, CONFIG_JSON)) else ""
        raise ConfigError(f"{folder} is a folder, name YAML files{hint}")
    values = load_files(list(files))[0]
    if "model_type" in values:
        hint = _FROM_HF.format(files[0])
        raise ConfigError(f"{', '.join(files)}: this is a Hugging Face config, not a YAML file{hint}")
    return values


_FROM_HF = "; `python -m tools.head_dim from-hf {}` writes one"


def load(files: Sequence[str], **changes: Any) -> NeoXArgs:
    """The arguments of some YAML files with `changes` put over them; a batch of 1 where none is given.

    Raises ConfigError with every problem.
    """
    values = {**values_of(files), **changes}
    if all(values.get(name) is None for name in _BATCH):
        values[_BATCH[1]] = 1
    return NeoXArgs.from_dict(values)
