"""Adapters (`lora`) in checkpoints: parameters beside those that they adapt, and a record in the geometry's stamp.

Shapes tell rank and targets, but not alpha, which scales the function that the weights are.
"""

from typing import Dict, List, Union

import torch

from megatron.checkpointing.checks import raise_problems
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.resharded import FromCheckpoint
from megatron.errors import CheckpointError
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER
from megatron.model.lora import is_adapter
from megatron.neox_arguments.lora import lora_settings

MERGE = "python tools/ckpts/merge_lora.py --input_dir IN --output_dir OUT"


def has_adapters(weights: Union[CheckpointReader, FromCheckpoint]) -> bool:
    """Whether the checkpoint that weights come from has any; if so, every layer has."""
    reader = weights if isinstance(weights, CheckpointReader) else weights.reader
    return any(is_adapter(name) for name in reader.layer_shapes(FIRST_TRANSFORMER_LAYER))


def adapter_problems(neox_args, reader: CheckpointReader) -> List[str]:
    """Why a checkpoint's adapters are not those of the config. With `finetune` it may have none."""
    settings = lora_settings(neox_args)
    if not has_adapters(reader):
        if settings is None or neox_args.finetune:
            return []
        return [
            f"lora={neox_args.lora}: it has no adapters; set finetune=true to train fresh ones on its weights, or "
            "remove lora"
        ]
    if settings is None:
        return [
            "it has adapters, without which its weights are those before training; set lora as in its configs/, or "
            f"merge them: {MERGE}"
        ]
    saved, wanted = (reader.stamp() or {}).get("lora") or {}, settings.stamp()
    return [
        f"lora.{key}: {value} in the checkpoint, {wanted[key]} in the config"
        for key, value in saved.items()
        if value != wanted.get(key, value)
    ]


def check_adapters(reader: CheckpointReader, neox_args) -> None:
    """Raises CheckpointError for a checkpoint without adapters, or with others than the config's."""
    if not has_adapters(reader):
        raise CheckpointError(f"{reader.folder} has no adapters; name a checkpoint of a run with lora")
    raise_problems(reader.folder, adapter_problems(neox_args, reader))


def refuse_adapters(reader: CheckpointReader) -> None:
    """Raises CheckpointError for a checkpoint with adapters, where each weight counts by itself."""
    if has_adapters(reader):
        raise CheckpointError(f"{reader.folder} has adapters (lora); merge them first: {MERGE}")


def without_fresh(layers: Dict[int, Dict[str, torch.Tensor]], weights) -> Dict[int, Dict[str, torch.Tensor]]:
    """The parameters of a model that `weights` are to fill: all, but for adapters if the checkpoint has none."""
    if has_adapters(weights):
        return layers
    return {
        index: {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
        for index, tensors in layers.items()
    }
