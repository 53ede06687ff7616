"""Every argument, one dataclass per group, in GPT-NeoX's order of groups; NeoXArgsAttention has what is new.

The classes only declare: names, types, defaults and documentation. Loading, deriving and validating are elsewhere,
and `megatron.neox_arguments.support` says what is done with each argument.
"""

from typing import Any, Dict

from megatron.neox_arguments.fields.attention import NeoXArgsAttention
from megatron.neox_arguments.fields.deepspeed import NeoXArgsDeepspeedConfig
from megatron.neox_arguments.fields.logging import NeoXArgsLogging
from megatron.neox_arguments.fields.lr_scheduler import NeoXArgsLRScheduler
from megatron.neox_arguments.fields.model import NeoXArgsModel
from megatron.neox_arguments.fields.moe import NeoXArgsMoE
from megatron.neox_arguments.fields.optimizer import NeoXArgsOptimizer
from megatron.neox_arguments.fields.other import NeoXArgsOther
from megatron.neox_arguments.fields.parallelism import NeoXArgsParallelism
from megatron.neox_arguments.fields.runner import NeoXArgsDeepspeedRunner
from megatron.neox_arguments.fields.textgen import NeoXArgsTextgen
from megatron.neox_arguments.fields.tokenizer import NeoXArgsTokenizer
from megatron.neox_arguments.fields.training import NeoXArgsTraining

_LAUNCH = (NeoXArgsDeepspeedRunner, NeoXArgsDeepspeedConfig)
_MODEL = (NeoXArgsModel, NeoXArgsMoE, NeoXArgsAttention)
_UPDATES = (NeoXArgsLRScheduler, NeoXArgsOptimizer)
_RUN = (NeoXArgsTokenizer, NeoXArgsTraining, NeoXArgsParallelism)
_OUTPUT = (NeoXArgsLogging, NeoXArgsTextgen, NeoXArgsOther)
GROUPS = (*_LAUNCH, *_MODEL, *_UPDATES, *_RUN, *_OUTPUT)


def defaults() -> Dict[str, Any]:
    """Name and default of every argument, in the order of `GROUPS`."""
    return {name: field.default for group in GROUPS for name, field in group.__dataclass_fields__.items()}


__all__ = ["GROUPS", "defaults"] + [group.__name__ for group in GROUPS]
