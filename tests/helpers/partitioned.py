"""Checkpoints in pieces, as DeepSpeed writes them under ZeRO stage 3, made of whole ones without an engine."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Dict, List

import torch


def as_partitioned(folder: str, out: Path, ranks: int, tied: Dict[str, str] = ()) -> str:
    """Write the weights in `folder`, files of pipe_parallel_size 0 at TP 1, in `ranks` pieces; returns the new folder.

    The parameters are in two groups. Each rank's piece is padded to a common length with numbers that belong nowhere.
    tied: {another name: name} of parameters that are saved once.
    """
    step = out / os.path.basename(folder)
    (step / "configs").mkdir(parents=True)
    for config in (Path(folder) / "configs").iterdir():
        (step / "configs" / config.name).write_bytes(config.read_bytes())
    state = torch.load(Path(folder) / "mp_rank_00_model_states.pt", weights_only=True)
    module = {name: tensor for name, tensor in state["module"].items() if name not in dict(tied)}
    groups = _groups(module)
    shapes = [OrderedDict((name, module[name].shape) for name in group) for group in groups]
    state.update(module=OrderedDict(), param_shapes=shapes, buffer_names=[], shared_params=dict(tied))
    for rank in range(ranks):
        state["dp_world_size"] = ranks
        torch.save(state, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat = [torch.cat([_piece(module[name], rank, ranks) for name in group]) for group in groups]
        optimizer = {"optimizer_state_dict": {"fp32_flat_groups": flat}}
        torch.save(optimizer, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return str(step)


def _groups(module: Dict[str, torch.Tensor]) -> List[List[str]]:
    names = list(module)
    return [names[: len(names) // 3], names[len(names) // 3 :]]


def _piece(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    share = -(-tensor.numel() // ranks)
    padded = torch.full((share * ranks,), 1e9)
    padded[: tensor.numel()] = tensor.flatten().float()
    return padded[rank * share : (rank + 1) * share].clone()
