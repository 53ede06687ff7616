"""Configs as the commands read them: YAML files merged as for training, without a tokenizer or data."""

from typing import Any, Sequence

from megatron.neox_arguments import NeoXArgs


def load(files: Sequence[str], **changes: Any) -> NeoXArgs:
    """The arguments of some YAML files with `changes` put over them. Raises ConfigError with every problem."""
    return NeoXArgs.from_ymls(list(files), changes or None)
