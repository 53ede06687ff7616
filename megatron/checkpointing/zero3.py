"""Whole weights out of a ZeRO stage 3 checkpoint, where every data-parallel rank wrote its piece of each tensor."""

import os
from typing import Dict, Iterator, List, Mapping, NamedTuple

import torch

from megatron.checkpointing.safe_load import load_file
from megatron.errors import CheckpointError


class _Place(NamedTuple):
    """Where a trained parameter is: [start, start + share) of every rank's numbers."""

    shape: torch.Size
    start: int
    share: int


class PartitionedWeights(Mapping[str, torch.Tensor]):
    """{name: fp32 tensor} of one model-parallel rank. A tensor is joined when it is asked for, and not kept.

    DeepSpeed lays the parameters out one after the other in the order of `param_shapes`; each rank holds
    ceil(numel / ranks) numbers of every one of them, the last rank's piece padded. Frozen ones, of which the optimizer
    knows nothing, are in the same pieces in a mapping of their own.
    Raises CheckpointError if pieces are missing or too short.
    """

    def __init__(self, folder: str, mp_rank: int):
        first = load_file(model_states_path(folder, 0, mp_rank), mmap=True)
        ranks = range(first["dp_world_size"])
        self._frozen_shapes = dict(first.get("frozen_param_shapes") or {})
        self._frozen = [_frozen_pieces(folder, rank, mp_rank) for rank in ranks] if self._frozen_shapes else []
        self._numbers = [_numbers(folder, rank, mp_rank) for rank in ranks]
        self._places: Dict[str, _Place] = {}
        offset = 0
        for name, shape in (item for group in first["param_shapes"] for item in group.items()):
            self._places[name] = _Place(shape, offset, -(-shape.numel() // len(ranks)))
            offset += self._places[name].share
            if any(sum(group.numel() for group in groups) < offset for groups in self._numbers):
                raise CheckpointError(f"{folder}: the optimizer files end within {name}; they are not of this model")
        self._buffers = {name: first["module"][name] for name in first["buffer_names"]}
        self._aliases = dict(first.get("shared_params") or {})

    def __getitem__(self, name: str) -> torch.Tensor:
        name = self._aliases.get(name, name)
        if name in self._buffers:
            return self._buffers[name]
        if name in self._frozen_shapes:
            shape = self._frozen_shapes[name]
            pieces = torch.cat([fragments[name].flatten() for fragments in self._frozen])
            return pieces[: shape.numel()].view(shape)
        shape, start, share = self._places[name]
        parts = [part for groups in self._numbers for part in _span(groups, start, start + share)]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._places, *self._frozen_shapes, *self._buffers, *self._aliases]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def on_meta(self, name: str) -> torch.Tensor:
        """A tensor's shape and dtype; nothing is read."""
        name = self._aliases.get(name, name)
        if name in self._buffers:
            return self._buffers[name]
        if name in self._frozen_shapes:
            return torch.empty(self._frozen_shapes[name], dtype=self._frozen[0][name].dtype, device="meta")
        return torch.empty(self._places[name].shape, dtype=self._numbers[0][0].dtype, device="meta")


def model_states_path(folder: str, dp_rank: int, mp_rank: int) -> str:
    """Where DeepSpeed keeps a rank's state when the weights are in pieces."""
    return os.path.join(folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_model_states.pt")


def _frozen_pieces(folder: str, dp_rank: int, mp_rank: int) -> Mapping[str, torch.Tensor]:
    return load_file(model_states_path(folder, dp_rank, mp_rank), mmap=True)["frozen_param_fragments"]


def _numbers(folder: str, dp_rank: int, mp_rank: int) -> List[torch.Tensor]:
    """All that a rank holds, in one flat tensor for each group of parameters; on the disk until it is used."""
    name = f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
    candidates = [os.path.join(folder, prefix + name) for prefix in ("", "bf16_")]
    path = next((path for path in candidates if os.path.isfile(path)), candidates[0])
    groups = load_file(path, mmap=True)["optimizer_state_dict"]["fp32_flat_groups"]
    return [group.flatten() for group in groups]


def _span(groups: List[torch.Tensor], start: int, end: int) -> List[torch.Tensor]:
    """The numbers [start, end), counted through all groups."""
    parts = []
    for group in groups:
        size = group.numel()
        if start < size and end > 0:
            parts.append(group[max(start, 0) : end])
        start, end = start - size, end - size
    return parts
