"""The random states kept in a checkpoint, under GPT-NeoX's names."""

import os
import random
from typing import Any, Dict

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from megatron import mpu
from megatron.checkpointing.safe_load import load_file, save_file
from megatron.errors import CheckpointError

KEYS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")


def random_states() -> Dict[str, Any]:
    """The state of every generator that training draws from. On a CPU the device's generator is torch's own."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": get_accelerator().get_rng_state(),
        "rng_tracker_states": mpu.get_cuda_rng_tracker().get_states(),
    }


def write_own_states(folder: str, mp_rank: int) -> None:
    """Replicas draw different dropout masks, but GPT-NeoX's files hold the states of the first replica only; each
    other one writes a file of its own, which GPT-NeoX does not look at."""
    if mpu.get_data_parallel_rank() > 0:
        save_file(random_states(), _own_path(folder, mp_rank))


def own_states(folder: str, mp_rank: int, first_replica: Dict[str, Any]) -> Dict[str, Any]:
    """This replica's states, or, where it has no file (as in a checkpoint by GPT-NeoX), those of the first."""
    path = _own_path(folder, mp_rank)
    if mpu.get_data_parallel_rank() > 0 and os.path.isfile(path):
        return load_file(path)
    return first_replica


def _own_path(folder: str, mp_rank: int) -> str:
    name = f"rng_states_dp_rank_{mpu.get_data_parallel_rank()}_mp_rank_{mp_rank:02d}.pt"
    return os.path.join(folder, name)


def restore_random_states(states: Dict[str, Any], source: str) -> None:
    """Continue the random sequences of the run that wrote `states`.

    Raises CheckpointError if some are missing, or belong to another kind of device.
    """
    missing = [key for key in KEYS if key not in states]
    if missing:
        raise CheckpointError(f"{source} has no {', '.join(missing)}; set no_load_rng=true to start them anew")
    device = get_accelerator()
    if states["cuda_rng_state"].numel() != device.get_rng_state().numel():
        raise CheckpointError(
            f"{source} has the random states of another kind of device than {device.device_name()}; "
            "set no_load_rng=true to start them anew"
        )
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    device.set_rng_state(states["cuda_rng_state"])
    mpu.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
