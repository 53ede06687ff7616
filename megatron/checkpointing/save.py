"""Saving: GPT-NeoX's files and keys, written where no loader looks and renamed when complete."""

import json
import os
from typing import Any, Dict

from megatron.checkpointing import folders
from megatron.checkpointing.ranks import barrier, rank, say, together
from megatron.checkpointing.rng import random_states, write_own_states
from megatron.checkpointing.safe_load import use_safe_files
from megatron.checkpointing.stamp import write_stamp
from megatron.errors import CheckpointError

ARGS_KEYS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
    "tokenizer_type",
    "model_parallel_size",
)
"""The `args` in a checkpoint. GPT-NeoX looks up each key it finds there, so one it does not know breaks its loading."""


def save_checkpoint(neox_args, iteration: int, engine) -> str:
    """Save `<save>/global_step<iteration>` and point `latest` to it; called on every rank. Returns the folder.

    Until the last step the previous checkpoint stays the one that is loaded. Afterwards all but the newest
    `keep_last_n_checkpoints` are deleted.

    Raises CheckpointError, on every rank, if a file cannot be written; what was there before is untouched then.
    """
    root = neox_args.save
    with together():
        _refuse(neox_args, engine)
        if rank() == 0:
            os.makedirs(root, exist_ok=True)
            folders.recover(root)
    files = use_safe_files(engine, keep_optimizer=not neox_args.no_save_optim)
    tag = folders.saving_tag(iteration)
    engine.save_checkpoint(root, tag=tag, client_state=client_state(neox_args, iteration), save_latest=False)
    try:
        with together():
            files.raise_failure()
            if not neox_args.no_save_rng:
                write_own_states(os.path.join(root, tag), engine.checkpoint_mp_rank)
        with together():
            if rank() == 0:
                _add_records(neox_args, os.path.join(root, tag))
                folders.publish(root, iteration)
    except CheckpointError:
        if rank() == 0:
            folders.recover(root)
        barrier()
        raise
    _remove_old(neox_args, iteration)
    barrier()
    return os.path.join(root, folders.tag_of(iteration))


def client_state(neox_args, iteration: int) -> Dict[str, Any]:
    """What GPT-NeoX adds to DeepSpeed's own state in each `mp_rank` file."""
    state = {"iteration": iteration, "args": {key: getattr(neox_args, key) for key in ARGS_KEYS}}
    if not neox_args.no_save_rng:
        state.update(random_states())
    return state


def _refuse(neox_args, engine) -> None:
    if not neox_args.save:
        raise CheckpointError("save is not set; name a folder for the checkpoints")
    folders.refuse_patterns("save", neox_args.save)
    if neox_args.no_save_optim and engine.zero_optimization_partition_weights():
        raise CheckpointError(
            "no_save_optim=true with ZeRO stage 3: the weights are only in the optimizer's files; unset one of them"
        )


def _add_records(neox_args, folder: str) -> None:
    write_stamp(neox_args, folder)
    if not neox_args.config_files:
        return
    configs = os.path.join(folder, "configs")
    os.makedirs(configs, exist_ok=True)
    for name, text in neox_args.config_files.items():
        with open(os.path.join(configs, os.path.basename(name)), "w") as file:
            file.write(text if isinstance(text, str) else json.dumps(text))
            file.flush()
            os.fsync(file.fileno())
    folders.sync_folder(configs)


def _remove_old(neox_args, iteration: int) -> None:
    keep = neox_args.keep_last_n_checkpoints
    if keep is None or rank() != 0:
        return
    removed = folders.remove_old(neox_args.save, keep, iteration)
    if removed:
        say(f"removed the checkpoints of iterations {', '.join(map(str, removed))} (keep_last_n_checkpoints={keep})")
