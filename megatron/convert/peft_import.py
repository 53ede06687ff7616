"""A folder of Hugging Face's PEFT with LoRA adapters, put on a checkpoint of the model that they were trained on."""

import json
import os
import re
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron.checkpointing.adapters import refuse_adapters
from megatron.checkpointing.config_texts import with_settings
from megatron.checkpointing.model_settings import checkpoint_folder, config_paths, inference_args
from megatron.checkpointing.reader import CheckpointReader, LayerState
from megatron.checkpointing.reshard import write_resharded
from megatron.checkpointing.resharded import FromCheckpoint
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.stamp import check_stamp
from megatron.convert import side_files
from megatron.convert.choose import choose_family
from megatron.convert.families.rope import with_plain_base
from megatron.convert.peft import CONFIG, WEIGHTS
from megatron.convert.rules import Line, write_out
from megatron.errors import ConversionError
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER
from megatron.model.lora import row_parts
from megatron.neox_arguments.loading import load_files
from megatron.neox_arguments.lora import TARGETS

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
Pairs = Dict[Tuple[int, str], Tuple[torch.Tensor, torch.Tensor]]
"""A and B of whole weights, by the layer's index and the weight's layer in it."""


class Theirs(NamedTuple):
    """An adapter of one of their modules, and the factor on its product."""

    A: torch.Tensor
    B: torch.Tensor
    scale: float


def import_peft(
    checkpoint: str,
    adapter: str,
    out: str,
    *,
    config_files: Sequence[str] = (),
    architecture: Optional[str] = None,
    iteration: Optional[int] = None,
    progress: bool = True,
) -> str:
    """Write the checkpoint with the adapters in it, at its own parallel sizes; returns the new folder.

    checkpoint, config_files, architecture, iteration: as for an export, of which the adapter's module names are. Parts
    that the adapter leaves out add nothing. Where its modules have several ranks, the smaller ones are filled up.

    Raises ConversionError for an adapter of another kind or of another model, CheckpointError, ConfigError.
    """
    reader = CheckpointReader(checkpoint_folder(checkpoint, iteration))
    refuse_adapters(reader)
    settings, texts = load_files(config_files or config_paths(reader.folder))
    neox_args = inference_args(reader, config_files)
    check_stamp(neox_args, reader.folder)
    plain = with_plain_base(neox_args)
    files = side_files.folder_of(reader.folder, settings)
    family = choose_family(plain, architecture, side_files.read_json(files, side_files.CONFIG).get("model_type"))
    lines = write_out(family.rules(plain), plain, plain.padded_vocab_size)
    theirs, dropout = read_adapter(adapter)
    pairs, scale = ours(theirs, lines, neox_args)
    rank = next(iter(pairs.values()))[1].shape[1]
    targets = [target for target in TARGETS if any(layer.endswith(target) for _, layer in pairs)]
    lora = {"rank": rank, "alpha": scale * rank, "dropout": dropout, "targets": targets}
    adapted = neox_args.update(lora=lora)
    weights = AdaptedReader(reader, adapted, pairs)
    texts = with_settings(texts, {"lora": lora}, "lora.yml")
    return write_resharded(weights, adapted, out, reader.pipe_parallel_size, texts, progress)


def read_adapter(folder: str) -> Tuple[Dict[str, Theirs], float]:
    """({module: its adapter}, dropout). Raises ConversionError for what is no plain LoRA."""
    config = _config(folder)
    path = os.path.join(folder, WEIGHTS)
    if not os.path.isfile(path):
        raise ConversionError(f"{folder} has no {WEIGHTS}; save the adapter with safetensors")
    tensors, found = load_file(path), {}
    strange = [name for name in tensors if not _NAME.fullmatch(name)]
    modules = {match.group(1) for match in map(_NAME.fullmatch, tensors) if match}
    for module in sorted(modules):
        names = [f"base_model.model.{module}.lora_{x}.weight" for x in "AB"]
        if any(name not in tensors for name in names):
            strange.append(f"{module} has one of lora_A and lora_B only")
        else:
            found[module] = Theirs(*(tensors[name] for name in names), _scale(config, module))
    if strange or not found:
        raise ConversionError(
            f"{path} holds no LoRA of linear layers alone: {', '.join(strange) or 'nothing is in it'}"
        )
    return found, float(config.get("lora_dropout") or 0.0)


def _config(folder: str) -> Dict[str, Any]:
    path = os.path.join(folder, CONFIG)
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from None
    wanted = {"peft_type": ("LORA",), "use_dora": (False, None), "bias": ("none", None), "modules_to_save": (None, [])}
    odd = [f"{key}={config.get(key)!r}" for key, values in wanted.items() if config.get(key) not in values]
    if odd:
        raise ConversionError(f"{path}: {', '.join(odd)}: only plain LoRA without trained biases or modules is taken")
    return config


def _scale(config: Dict[str, Any], module: str) -> float:
    """alpha / rank of a module, as PEFT finds them: patterns match the end of its name."""
    rank, alpha = (
        next(
            (value for key, value in (config.get(patterns) or {}).items() if re.fullmatch(rf"(.*\.)?({key})", module)),
            config[default],
        )
        for patterns, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def ours(theirs: Dict[str, Theirs], lines: Sequence[Line], neox_args) -> Tuple[Pairs, float]:
    """(our whole A and B, the one factor on their products). Raises ConversionError for modules that no line has."""
    rank, scale = max(one.A.shape[0] for one in theirs.values()), next(iter(theirs.values())).scale
    alike = {module: _alike(one, rank, scale) for module, one in theirs.items()}
    targets = {line.ours for line in lines if any(_module(name) in theirs for name in line.theirs)}
    known = {_module(name) for line in lines for name in line.theirs if line.ours in _WEIGHTS}
    problems = [f"{module}: no such module can have an adapter here" for module in theirs if module not in known]
    pairs: Pairs = {}
    for line in lines if not problems else ():
        if line.ours in targets:
            problems += _shape_problems(line, theirs)
            target = line.ours.removesuffix(".weight")
            parts = row_parts(neox_args, target.rpartition(".")[2], line.index - FIRST_TRANSFORMER_LAYER)
            if not problems:
                pairs[line.index, target] = _our_pair(line, alike, rank, 1 if parts is None else int(parts.max()) + 1)
    if problems:
        raise ConversionError(problems)
    return pairs, scale


_WEIGHTS = [f"{'attention' if target in TARGETS[:2] else 'mlp'}.{target}.weight" for target in TARGETS]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _alike(one: Theirs, rank: int, scale: float) -> Theirs:
    """The same product, of this rank and with this factor."""
    missing = rank - one.A.shape[0]
    B = one.B if one.scale == scale else one.B * (one.scale / scale)
    return Theirs(F.pad(one.A, (0, 0, 0, missing)), F.pad(B, (0, missing)), scale)


def _shape_problems(line: Line, theirs: Dict[str, Theirs]) -> Iterator[str]:
    for name, (rows, columns) in zip(line.theirs, line.shapes, strict=True):
        one = theirs.get(_module(name))
        if one is not None and (one.A.shape[1], one.B.shape[0]) != (columns, rows):
            yield (
                f"{_module(name)}: the adapter is of a weight [{one.B.shape[0]}, {one.A.shape[1]}], the model's is "
                f"[{rows}, {columns}]"
            )


def _our_pair(line: Line, theirs: Dict[str, Theirs], rank: int, parts: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """What is missing adds nothing: its B is 0, and its A as at the start of training, so that it can be trained."""
    first = next(iter(theirs.values()))
    generator = torch.Generator().manual_seed(line.index)
    A, B = [], []
    for name, (rows, columns) in zip(line.theirs, line.shapes, strict=True):
        fresh = (torch.rand(rank, columns, generator=generator) * 2 - 1) * columns**-0.5
        one = theirs.get(_module(name)) or Theirs(fresh.to(first.A), first.B.new_zeros(rows, rank), first.scale)
        A.append(one.A)
        B.append(one.B)
    if len(A) < parts:  # one module of theirs for several parts of ours
        A = A * parts
    return torch.cat(A), line.operation.merge(B, line.widths)


class AdaptedReader(FromCheckpoint):
    """The weights of a CheckpointReader with adapters beside them, layer by layer, rank by rank.

    adapted_args: the model with `lora`, at the checkpoint's number of ranks.
    """

    def __init__(self, reader: CheckpointReader, adapted_args, pairs: Pairs):
        self.reader = reader
        self.model_parallel_size = reader.model_parallel_size
        self.vocabulary_rows = adapted_args.padded_vocab_size
        self._shards, self._pairs = Shards(adapted_args), pairs

    def layer_state(self, index: int, tp_rank: int = 0) -> LayerState:
        """{name: tensor} of one layer on one rank."""
        state = dict(self.reader.layer_state(index, tp_rank))
        for layer, pair in ((layer, pair) for (at, layer), pair in self._pairs.items() if at == index):
            for x, whole in zip("AB", pair, strict=True):
                name = f"{layer}.lora.{x}"
                state[name] = self._shards.piece(index, name, whole, tp_rank, self.model_parallel_size)
        return state
