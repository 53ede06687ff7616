"""Resuming a run, or starting one from the weights of another."""

import contextlib
import io
import os
from typing import Any, Dict, Optional

import torch

from megatron import mpu
from megatron.checkpointing.adapters import adapter_problems
from megatron.checkpointing.checks import args_problems, layout_problems, optimizer_is_in_files, raise_problems
from megatron.checkpointing.folders import find_checkpoint, refuse_patterns
from megatron.checkpointing.ranks import say, together
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.rng import own_states, restore_random_states
from megatron.checkpointing.safe_load import use_safe_files, verify_file
from megatron.checkpointing.stamp import check_stamp
from megatron.checkpointing.weights import layers_of, load_model_weights, tensor_parallel_problems, weight_problems
from megatron.errors import CheckpointError


def load_checkpoint(neox_args, engine, iteration: Optional[int] = None) -> int:
    """Restore `engine` from `neox_args.load`; called on every rank. Returns the iteration to continue from.

    Without a checkpoint the run starts from scratch (0), unless `iteration` asks for a certain one. With `finetune`
    only the weights are taken and the iteration is 0; with `no_load_optim` the weights, random states and iteration;
    with `no_load_rng` everything but the random states.

    Raises CheckpointError, on every rank and before the engine is changed, if files are missing or damaged, or if
    the geometry, the settings, the parallel layout, a name or a shape is another one.
    """
    with together():
        folder = find_checkpoint(neox_args.load, iteration) if neox_args.load else None
    if folder is None:
        say(f"load={neox_args.load} holds no checkpoint: starting from scratch at iteration 0")
        return 0
    if neox_args.finetune or neox_args.no_load_optim:
        state = _take_weights(neox_args, engine, folder, iteration)
    else:
        state = _resume(neox_args, engine, folder)
    if neox_args.finetune:
        return 0
    with together():
        if not neox_args.no_load_rng:
            restore_random_states(own_states(folder, engine.checkpoint_mp_rank, state), folder)
        reached = state.get("iteration", state.get("total_iters"))
        if reached is None:
            raise CheckpointError(f"{folder} does not say its iteration; set finetune=true to start from 0")
    say(f"continuing from {folder} at iteration {reached}")
    return reached


def _resume(neox_args, engine, folder: str) -> Dict[str, Any]:
    with together():
        refuse_patterns("load", neox_args.load)
        check_stamp(neox_args, folder)
        reader = CheckpointReader(folder)
        raise_problems(folder, tensor_parallel_problems(neox_args, reader))
        raise_problems(folder, args_problems(neox_args, reader.args))
        raise_problems(folder, adapter_problems(neox_args, reader))
        raise_problems(folder, _stacking_problems(reader) or _missing_rank(engine, reader))
        raise_problems(folder, layout_problems(neox_args, engine, reader))
        raise_problems(folder, _model_problems(engine, reader))
        use_safe_files(engine)
        _verify_files(engine, reader)
    with together():
        try:
            return _load_engine(engine, os.path.dirname(folder), os.path.basename(folder))
        except torch.OutOfMemoryError:
            raise
        except (ValueError, KeyError, RuntimeError, AssertionError) as error:
            # Weights and layout fit, as checked above: what is left is the optimizer's and the schedule's state.
            raise CheckpointError(
                f"the training state in {folder} does not fit this run's optimizer settings ({error}); use those "
                "of the checkpoint's run, or set no_load_optim=true to take only its weights"
            ) from error


def _load_engine(engine, root: str, tag: str) -> Dict[str, Any]:
    """Weights, optimizer, schedule and counters; returns the rest of the `mp_rank` file.

    DeepSpeed 0.19 writes one file per rank for the bf16 optimizer of a pipeline without ZeRO, as it does under ZeRO,
    but then gives load_state_dict something else to read; here it gets the files.
    """
    in_files = optimizer_is_in_files(engine) and not engine.zero_optimization()
    _, state = engine.load_checkpoint(root, tag=tag, load_optimizer_states=not in_files)
    if in_files:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed has left a print there
            engine._load_zero_checkpoint(root, tag)
    return state


def _take_weights(neox_args, engine, folder: str, iteration: Optional[int]) -> Dict[str, Any]:
    load_model_weights(neox_args, engine.module, iteration)
    _refresh_master_weights(engine)
    with together():
        reader = CheckpointReader(folder)
        mp_rank = engine.checkpoint_mp_rank if reader.has_rank_state(engine.checkpoint_mp_rank) else 0
        return reader.rank_state(mp_rank) if reader.has_rank_state(mp_rank) else {}


def _refresh_master_weights(engine) -> None:
    """Mixed-precision and ZeRO optimizers step copies of the weights, which must follow the ones just loaded."""
    if engine.zero_optimization():
        engine.optimizer._restore_from_bit16_weights()
    elif hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()


def _model_problems(engine, reader: CheckpointReader):
    if reader.is_partitioned:  # the pieces have no shapes of their own; the recorded ones are compared
        saved = reader.rank_state(engine.checkpoint_mp_rank)["param_shapes"]
        ours = engine._get_zero_param_shapes()
        return [] if saved == ours else _shape_differences(saved, ours)
    return weight_problems(engine.module, reader, mpu.get_model_parallel_rank())


def _shape_differences(saved, ours):
    theirs = {name: list(shape) for group in saved for name, shape in group.items()}
    wanted = {name: list(shape) for group in ours for name, shape in group.items()}
    differing = [name for name in sorted(theirs.keys() | wanted.keys()) if theirs.get(name) != wanted.get(name)]
    if not differing:
        return ["the parameters are grouped or ordered otherwise (weight_decay or optimizer settings differ)"]
    shapes = ((name, theirs.get(name), wanted.get(name)) for name in differing)
    return [f"{name}: shape {saved} in the checkpoint, {ours} in the model" for name, saved, ours in shapes]


def _stacking_problems(reader: CheckpointReader):
    if not reader.stacks_branches:
        return []
    return [
        "mlp.w1 and mlp.w3 of an older version are one weight today (mlp.linear1), which its optimizer state does not "
        "fit; set no_load_optim=true (or finetune=true) to take only its weights"
    ]


def _missing_rank(engine, reader: CheckpointReader):
    rank = engine.checkpoint_mp_rank
    return [] if reader.has_rank_state(rank) else [f"the file of model-parallel rank {rank} is missing"]


def _verify_files(engine, reader: CheckpointReader) -> None:
    """Every file that this rank is about to read is there and has its checksum."""
    if reader.is_layered:
        reader.verify(mpu.get_model_parallel_rank(), layers_of(engine.module))
    root, tag = os.path.split(reader.folder)
    verify_file(engine._get_ckpt_name(root, tag))
    if not optimizer_is_in_files(engine):
        return
    path = engine._get_zero_ckpt_name(root, tag)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{path} is missing: the optimizer state is not complete; set no_load_optim=true to take only the weights"
        )
    verify_file(path)
