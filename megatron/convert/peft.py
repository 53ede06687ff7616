"""Adapters of a checkpoint as a folder of Hugging Face's PEFT, for the exported model that they adapt."""

import os
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from safetensors.torch import save

from megatron.checkpointing.adapters import check_adapters
from megatron.checkpointing.model_settings import checkpoint_folder, config_paths, inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.resharded import ReshardedReader
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.stamp import check_stamp
from megatron.convert import side_files
from megatron.convert.choose import choose_family
from megatron.convert.families.rope import with_plain_base
from megatron.convert.hf_writer import sync_file, write_json
from megatron.convert.outputs import check_new, new_folder
from megatron.convert.rules import Line, write_out
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER
from megatron.model.lora import row_parts, spread
from megatron.neox_arguments.loading import load_files
from megatron.neox_arguments.lora import LoRASettings, lora_settings

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Adapter(NamedTuple):
    """Of one linear module of theirs, by its full name: A [rank, i], B [o, rank]."""

    module: str
    A: torch.Tensor
    B: torch.Tensor


def export_peft(
    checkpoint: str,
    out: str,
    *,
    config_files: Sequence[str] = (),
    architecture: Optional[str] = None,
    iteration: Optional[int] = None,
    base_model: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Write the adapters of a checkpoint as `adapter_config.json` and `adapter_model.safetensors`; returns the folder.

    checkpoint, config_files, architecture, iteration: as for an export. base_model: the name or folder of the model
    without adapters, which is written into the config for PEFT to find.

    Raises CheckpointError for a checkpoint without adapters or with damaged ones, ConversionError if no architecture
    can hold the model; there is then nothing under `out`.
    """
    check_new(os.path.abspath(out))
    reader = CheckpointReader(checkpoint_folder(checkpoint, iteration))
    settings = load_files(config_files or config_paths(reader.folder))[0]
    neox_args = inference_args(reader, config_files)
    check_stamp(neox_args, reader.folder)
    check_adapters(reader, neox_args)
    plain = with_plain_base(neox_args.update(lora=None))
    files = side_files.folder_of(reader.folder, settings)
    family = choose_family(plain, architecture, side_files.read_json(files, side_files.CONFIG).get("model_type"))
    lines = write_out(family.rules(plain), plain, plain.padded_vocab_size)
    say(f"{reader.folder}: the adapters of a {family.architecture}")
    adapters = list(_adapters(reader, neox_args, lines))
    others = [name.removesuffix(".weight") for line in lines for name in line.theirs]
    with new_folder(out) as unfinished:
        _write_weights(adapters, os.path.join(unfinished, WEIGHTS))
        write_json(os.path.join(unfinished, CONFIG), adapter_config(adapters, neox_args, others, base_model))
    return out


def _adapters(reader: CheckpointReader, neox_args, lines: Sequence[Line]) -> Iterator[Adapter]:
    weights = ReshardedReader(reader, Shards(neox_args), 1, neox_args.padded_vocab_size)
    for index in reader.layer_indices():
        weights.verify_layer(index)
        names = set(reader.layer_shapes(index))
        for line in (line for line in lines if line.index == index):
            layer = line.ours.removesuffix(".weight")
            if f"{layer}.lora.A" in names:
                A, B = (weights.whole_tensor(index, f"{layer}.lora.{x}") for x in "AB")
                parts = row_parts(neox_args, layer.rpartition(".")[2], index - FIRST_TRANSFORMER_LAYER)
                yield from their_adapters(line, A, B, parts)


def their_adapters(
    line: Line, A: torch.Tensor, B: torch.Tensor, parts: Optional[torch.Tensor] = None
) -> Iterator[Adapter]:
    """Ours of one weight, whole, as theirs of the modules that the weight is made of.

    Where they have one module for several of our parts, its rank is as many times ours.
    """
    modules = [name.removesuffix(".weight") for name in line.theirs]
    number = 1 if parts is None else int(parts.max()) + 1
    if len(modules) == number:
        yield from map(Adapter, modules, A.chunk(number), line.operation.split(B, line.widths))
    else:
        wide = spread(B, torch.nn.functional.one_hot(parts).to(B))
        yield Adapter(*modules, A, *line.operation.split(wide, line.widths))


def _write_weights(adapters: List[Adapter], path: str) -> None:
    tensors = {}
    for module, A, B in adapters:
        tensors[f"base_model.model.{module}.lora_A.weight"] = A.contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = B.contiguous()
    with open(path, "wb") as file:  # the library's own file would be for its owner only
        file.write(save(tensors, metadata={"format": "pt"}))
    sync_file(path)


def adapter_config(adapters: List[Adapter], neox_args, modules: Sequence[str], base_model: str) -> Dict[str, Any]:
    """PEFT's LoraConfig. modules: all of the model's, so that no other than the adapted ones are named."""
    settings: LoRASettings = lora_settings(neox_args)
    targets, ranks = _targets({adapter.module: adapter.A.shape[0] for adapter in adapters}, modules)
    wider = {target: rank for target, rank in ranks.items() if rank != settings.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": _number(settings.alpha),
        "lora_dropout": settings.dropout,
        "target_modules": targets,
        "rank_pattern": wider,
        "alpha_pattern": {target: _number(settings.scale * rank) for target, rank in wider.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
    }


def _targets(adapted: Dict[str, int], modules: Sequence[str]) -> Tuple[List[str], Dict[str, int]]:
    """Names that PEFT finds the adapted modules by, with their ranks: the last word, where no other module ends in
    it."""
    others = {name.rpartition(".")[2] for name in modules if name not in adapted}
    ranks: Dict[str, int] = {}
    for name, rank in adapted.items():
        word = name.rpartition(".")[2]
        ranks[name if word in others else word] = rank
    return sorted(ranks), ranks


def _number(value: float) -> Any:
    """PEFT's own files have whole numbers."""
    return int(value) if float(value).is_integer() else value
