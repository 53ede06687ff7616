"""Whole weights out of a ZeRO stage 3 checkpoint, where every data-parallel rank wrote its piece of each tensor."""

import os
from typing import Dict, List

import torch

from megatron.checkpointing.safe_load import load_file
from megatron.errors import CheckpointError


def join_partitions(folder: str, mp_rank: int) -> Dict[str, torch.Tensor]:
    """{name: fp32 tensor} of one model-parallel rank.

    DeepSpeed lays the parameters out one after the other in the order of `param_shapes`; each rank holds
    ceil(numel / ranks) numbers of every one of them, the last rank's piece padded.
    Raises CheckpointError if pieces are missing or too short.
    """
    first = load_file(model_states_path(folder, 0, mp_rank))
    pieces = [_pieces(folder, rank, mp_rank) for rank in range(first["dp_world_size"])]
    joined: Dict[str, torch.Tensor] = {}
    offset = 0
    for name, shape in (item for group in first["param_shapes"] for item in group.items()):
        share = -(-shape.numel() // len(pieces))
        parts = [piece[offset : offset + share] for piece in pieces]
        if any(part.numel() != share for part in parts):
            raise CheckpointError(f"{folder}: the optimizer files end within {name}; they are not of this model")
        joined[name] = torch.cat(parts)[: shape.numel()].view(shape)
        offset += share
    joined.update({name: first["module"][name] for name in first["buffer_names"]})
    joined.update({alias: joined[name] for alias, name in (first.get("shared_params") or {}).items()})
    return joined


def model_states_path(folder: str, dp_rank: int, mp_rank: int) -> str:
    """Where DeepSpeed keeps a rank's state when the weights are in pieces."""
    return os.path.join(folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt")


def _pieces(folder: str, dp_rank: int, mp_rank: int) -> torch.Tensor:
    name = f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
    candidates = [os.path.join(folder, prefix + name) for prefix in ("", "bf16_")]
    path = next((path for path in candidates if os.path.isfile(path)), candidates[0])
    groups: List[torch.Tensor] = load_file(path, mmap=True)["optimizer_state_dict"]["fp32_flat_groups"]
    return torch.cat([group.flatten() for group in groups])
