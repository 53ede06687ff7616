"""Weights without an optimizer: for generation, fine-tuning and another parallel layout."""

from contextlib import nullcontext
from typing import Any, Dict, List, Union

import deepspeed
import torch

from megatron import mpu
from megatron.checkpointing.adapters import adapter_problems, has_adapters, without_fresh
from megatron.checkpointing.checks import args_problems, raise_problems
from megatron.checkpointing.folders import find_checkpoint
from megatron.checkpointing.legacy import is_extra_state, is_unused_buffer
from megatron.checkpointing.ranks import say, together
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.resharded import ReshardedReader
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.stamp import check_stamp
from megatron.checkpointing.te_names import conversion_hints
from megatron.errors import CheckpointError

Weights = Union[CheckpointReader, ReshardedReader]


def load_model_weights(neox_args, model, iteration=None) -> int:
    """Fill `model` (GPT2ModelPipe or GPT2ModelSequential) from `neox_args.load`; returns the checkpoint's iteration.

    Any pipe_parallel_size and model_parallel_size read any other's files; the function stays the same. Values are
    converted to the model's dtype. Raises CheckpointError, before anything is changed, if there is no checkpoint, if
    it is of another geometry or has other settings, if its tensor-parallel shards do not fit together, or if any name
    or shape differs; all differences are listed.
    """
    with together():
        folder = find_checkpoint(neox_args.load, iteration) if neox_args.load else None
        if folder is None:
            raise CheckpointError(f"load={neox_args.load} holds no checkpoint; name a folder with a global_step<N>")
    return load_weights_from(neox_args, model, folder)


def load_weights_from(neox_args, model, folder: str) -> int:
    """As load_model_weights, from the checkpoint folder itself, whatever its name."""
    with together():
        check_stamp(neox_args, folder)
        reader = CheckpointReader(folder)
        resharded = reader.model_parallel_size != neox_args.model_parallel_size
        raise_problems(folder, args_problems(neox_args, reader.args, resharded))
        raise_problems(folder, adapter_problems(neox_args, reader))
        weights = _resharded(neox_args, reader) if resharded else reader
        raise_problems(folder, weight_problems(model, weights, mpu.get_model_parallel_rank()))
        weights.verify(mpu.get_model_parallel_rank(), layers_of(model))
    fill(model, weights, mpu.get_model_parallel_rank())
    say(f"loaded the weights in {folder}")
    if neox_args.lora is not None and not has_adapters(reader):
        say("they have no adapters (lora): those of this run start afresh")
    if resharded:
        say(f"they were split over {reader.model_parallel_size} tensor-parallel ranks{_caveat(neox_args)}")
    return reader.iteration or 0


def layers_of(model) -> Dict[int, Dict[str, torch.Tensor]]:
    """{layer index: {name: tensor}} of the weights that this rank keeps, as a checkpoint names them.

    Transformer Engine's FP8 scaling factors (`_extra_state`) are none.
    """
    if hasattr(model, "forward_funcs"):  # DeepSpeed's PipelineModule: this stage's layers
        modules = enumerate(model.forward_funcs, start=model._local_start)
        states = ((index, _weights(module)) for index, module in modules if _has_weights(module))
        return {index: state for index, state in states if state}
    layers: Dict[int, Dict[str, torch.Tensor]] = {}
    for name, tensor in _weights(model).items():
        _, index, rest = name.split(".", 2)
        layers.setdefault(int(index), {})[rest] = tensor
    return layers


def weight_problems(model, reader: Weights, tp_rank: int) -> List[str]:
    """Every missing, unexpected or differently shaped weight, as lines. Adapters may be missing all together."""
    wanted = without_fresh(layers_of(model), reader)
    problems, names = [], ([], [])
    for index in sorted(set(wanted) | _present(model, reader, tp_rank)):
        saved, ours = reader.layer_state(index, tp_rank), wanted.get(index, {})
        saved = {name: tensor for name, tensor in saved.items() if not is_extra_state(name)}
        names[0].extend(saved)
        names[1].extend(ours)
        for name in sorted(set(saved) | set(ours)):
            if name not in saved:
                problems.append(f"layer {index} {name}: missing in the checkpoint")
            elif name not in ours and is_unused_buffer(name):
                continue
            elif name not in ours:
                problems.append(f"layer {index} {name}: in the checkpoint, but this model has no such parameter")
            elif tuple(saved[name].shape) != _shape(ours[name]):
                shapes = f"{list(saved[name].shape)} in the checkpoint, {list(_shape(ours[name]))} in the model"
                problems.append(f"layer {index} {name}: shape {shapes}")
    return conversion_hints(*names) + problems


def tensor_parallel_problems(neox_args, reader: CheckpointReader) -> List[str]:
    """An optimizer's state cannot be joined or split."""
    if reader.model_parallel_size == neox_args.model_parallel_size:
        return []
    return [
        f"model_parallel_size: {reader.model_parallel_size} in the checkpoint, {neox_args.model_parallel_size} in the "
        "config, and optimizer state cannot be joined or split; set it to the checkpoint's, or take only the weights: "
        "no_load_optim=true, finetune=true, or tools/ckpts/reshard.py"
    ]


def fill(model, reader: Weights, tp_rank: int) -> None:
    """Copy a checkpoint's weights into a model whose names and shapes agree with it. FP8 scaling starts afresh, and so
    do adapters that the checkpoint has not."""
    with torch.no_grad():
        for index, tensors in without_fresh(layers_of(model), reader).items():
            state = reader.layer_state(index, tp_rank)
            with _writable(tensors.values()):
                for name, tensor in tensors.items():
                    tensor.copy_(state[name])
    if hasattr(model, "_synchronize_tied_weights"):
        model._synchronize_tied_weights()


def _resharded(neox_args, reader: CheckpointReader) -> ReshardedReader:
    vocab_size = None if getattr(neox_args, "tokenizer", None) is None else neox_args.tokenizer.vocab_size
    ranks, rows = neox_args.model_parallel_size, neox_args.padded_vocab_size
    return ReshardedReader(reader, Shards(neox_args), ranks, rows, vocab_size)


def _caveat(neox_args) -> str:
    """The one function that GPT-NeoX lets depend on the number of ranks."""
    joint = neox_args.layer_attention().qk_norm == "joint"
    if joint and neox_args.norm in ("layernorm", "non_parametric_layernorm"):
        return "; a joint qk norm of norm=layernorm takes its mean over one rank's heads, so results differ a little"
    return ""


def _weights(module: Any) -> Dict[str, torch.Tensor]:
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not is_extra_state(name)}


def _has_weights(module: Any) -> bool:
    return hasattr(module, "state_dict") and hasattr(module, "load_state_dict")


def _present(model, reader: Weights, tp_rank: int) -> set:
    """The saved layers that this rank's model should have a place for."""
    indices = set(reader.layer_indices(tp_rank))
    if hasattr(model, "forward_funcs"):
        return indices & set(range(model._local_start, model._local_stop))
    return indices


def _shape(tensor: torch.Tensor) -> tuple:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _writable(tensors):
    """Under ZeRO stage 3 a parameter is in pieces: it is joined, filled, and cut again on leaving."""
    parts = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    return deepspeed.zero.GatheredParameters(parts, modifier_rank=0) if parts else nullcontext()
