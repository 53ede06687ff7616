"""Configs as the commands read them: YAML files merged as for training, without a tokenizer or data."""

from typing import Any, Dict, Sequence

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.loading import load_files

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")


def values_of(files: Sequence[str]) -> Dict[str, Any]:
    """The settings of some YAML files, merged. Raises ConfigError."""
    return load_files(list(files))[0]


def load(files: Sequence[str], **changes: Any) -> NeoXArgs:
    """The arguments of some YAML files with `changes` put over them; a batch of 1 where none is given.

    Raises ConfigError with every problem.
    """
    values = {**values_of(files), **changes}
    if all(values.get(name) is None for name in _BATCH):
        values[_BATCH[1]] = 1
    return NeoXArgs.from_dict(values)
