"""One way of reading a model's weights from each form of checkpoint.

layers       `layer_<index>-model_<tp>-model_states.pt`, one for each layer and tensor-parallel rank (pipe_parallel_size
             >= 1)
sequential   `mp_rank_<tp>_model_states.pt`, whose `module` holds `sequential.<index>.<name>` (pipe_parallel_size 0)
partitioned  `zero_pp_rank_<dp>_mp_rank_<tp>_*.pt`: as sequential, with each tensor in pieces (ZeRO stage 3)

Names of older versions become today's here, so that nothing else has to know them.
"""

import os
import re
from typing import Any, Dict, Iterable, List, Optional

import torch

from megatron.checkpointing.legacy import current_names, is_saved_tensor, stacks_branches
from megatron.checkpointing.safe_load import load_file, verify_file
from megatron.checkpointing.stamp import checkpoint_config, read_stamp
from megatron.checkpointing.zero3 import join_partitions, model_states_path
from megatron.errors import CheckpointError

_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_PARTITIONED_FILE = re.compile(r"zero_pp_rank_\d+_mp_rank_(\d+)_model_states\.pt")
_SEQUENTIAL_NAME = re.compile(r"sequential\.(\d+)\.(.+)")

LayerState = Dict[str, torch.Tensor]


class CheckpointReader:
    """The weights and records in one `global_step<N>` folder. Tensors stay on disk until they are used.

    Raises CheckpointError when the folder holds no complete model.
    """

    def __init__(self, folder: str):
        self.folder = folder
        names = sorted(os.listdir(folder))
        self._layer_files = {(int(index), int(tp)) for index, tp in _matches(_LAYER_FILE, names)}
        self.is_partitioned = bool(_matches(_PARTITIONED_FILE, names))
        pattern = _PARTITIONED_FILE if self.is_partitioned else _RANK_FILE
        self._mp_ranks = {int(rank) for (rank,) in _matches(pattern, names)}
        self._rank_states: Dict[int, Dict[str, Any]] = {}
        self._layers_of_rank: Dict[int, Dict[int, LayerState]] = {}
        self._check_complete()

    @property
    def is_layered(self) -> bool:
        """One file per layer, as pipe_parallel_size >= 1 writes them."""
        return bool(self._layer_files)

    @property
    def model_parallel_size(self) -> int:
        """The number of tensor-parallel ranks the weights are split over."""
        return 1 + max(tp for _, tp in self._layer_files) if self.is_layered else len(self._mp_ranks)

    @property
    def pipe_parallel_size(self) -> int:
        """The pipeline stages of the run that saved; 0 without layer files."""
        return max(1, len(self._mp_ranks) // self.model_parallel_size) if self.is_layered else 0

    def layer_indices(self, tp_rank: int = 0) -> List[int]:
        """The layers that have weights, ascending."""
        if self.is_layered:
            return sorted(index for index, tp in self._layer_files if tp == tp_rank)
        return sorted(self._sequential_layers(tp_rank))

    def layer_state(self, index: int, tp_rank: int = 0) -> LayerState:
        """{name: tensor} of one layer on one tensor-parallel rank; {} for a layer without weights."""
        return current_names(self._saved_layer(index, tp_rank))

    @property
    def stacks_branches(self) -> bool:
        """Whether tensors that were saved apart (mlp.w1 and w3) are read as one."""
        return any(stacks_branches(self._saved_layer(index, 0)) for index in self.layer_indices()[:2])

    def _saved_layer(self, index: int, tp_rank: int) -> LayerState:
        if not self.is_layered:
            return self._sequential_layers(tp_rank).get(index, {})
        if (index, tp_rank) not in self._layer_files:
            return {}
        path = os.path.join(self.folder, layer_file(index, tp_rank))
        state = load_file(path, mmap=True)
        if not isinstance(state, dict) or not all(is_saved_tensor(name, value) for name, value in state.items()):
            raise CheckpointError(f"{path} does not hold a layer: a dictionary of tensors was expected")
        return state

    def has_rank_state(self, mp_rank: int = 0) -> bool:
        """Whether the `mp_rank` file exists; checkpoints made by converters may have layer files only."""
        return mp_rank in self._mp_ranks

    def rank_state(self, mp_rank: int = 0) -> Dict[str, Any]:
        """Everything in one `mp_rank` file: DeepSpeed's state, `iteration`, `args`, random states."""
        if mp_rank not in self._rank_states:
            path = self._rank_path(mp_rank)
            state = load_file(path, mmap=True)
            if not isinstance(state, dict):
                raise CheckpointError(f"{path} holds a {type(state).__name__}, not a checkpoint")
            self._rank_states[mp_rank] = state
        return self._rank_states[mp_rank]

    @property
    def iteration(self) -> Optional[int]:
        """The iteration recorded in the files, or None."""
        state = self.rank_state() if self.has_rank_state() else {}
        return state.get("iteration", state.get("total_iters"))

    @property
    def args(self) -> Dict[str, Any]:
        """The settings recorded in the files; {} if there are none."""
        return (self.rank_state().get("args") if self.has_rank_state() else None) or {}

    def verify(self, tp_rank: int, layers: Iterable[int]) -> None:
        """Read once through the weights of these layers. Raises CheckpointError if a file was changed or damaged."""
        if self.is_layered:
            names = [layer_file(index, tp_rank) for index in layers if (index, tp_rank) in self._layer_files]
        else:
            names = [name for name in os.listdir(self.folder) if f"mp_rank_{tp_rank:02d}_" in name]
        for name in names:
            verify_file(os.path.join(self.folder, name))

    def stamp(self) -> Optional[Dict[str, Any]]:
        """The head-geometry record, or None."""
        return read_stamp(self.folder)

    def config(self) -> Dict[str, Any]:
        """The YAML settings kept beside the weights, merged."""
        return checkpoint_config(self.folder)

    def _rank_path(self, mp_rank: int) -> str:
        if self.is_partitioned:
            return model_states_path(self.folder, 0, mp_rank)
        return os.path.join(self.folder, f"mp_rank_{mp_rank:02d}_model_states.pt")

    def _sequential_layers(self, tp_rank: int) -> Dict[int, LayerState]:
        if tp_rank not in self._layers_of_rank:
            self._layers_of_rank[tp_rank] = self._by_layer(tp_rank, self._module(tp_rank))
        return self._layers_of_rank[tp_rank]

    def _module(self, tp_rank: int) -> LayerState:
        if self.is_partitioned:
            return join_partitions(self.folder, tp_rank)
        module = self.rank_state(tp_rank).get("module")
        if not isinstance(module, dict):
            raise CheckpointError(f"{self._rank_path(tp_rank)} holds no weights, and there are no layer files")
        return module

    def _by_layer(self, tp_rank: int, module: LayerState) -> Dict[int, LayerState]:
        layers: Dict[int, LayerState] = {}
        for name, tensor in module.items():
            match = _SEQUENTIAL_NAME.fullmatch(name)
            if match is None:
                raise CheckpointError(f"{self._rank_path(tp_rank)}: {name} is not named sequential.<layer>.<name>")
            layers.setdefault(int(match.group(1)), {})[match.group(2)] = tensor
        return layers

    def _check_complete(self) -> None:
        if not self._layer_files and not self._mp_ranks:
            raise CheckpointError(
                f"{self.folder} holds no model: neither layer_*-model_*-model_states.pt nor mp_rank_*_model_states.pt"
            )
        ranks = range(self.model_parallel_size)
        wanted = {(index, tp) for index, _ in self._layer_files for tp in ranks}
        missing = [layer_file(*key) for key in sorted(wanted - self._layer_files)]
        gaps = sorted(set(range(max(self._mp_ranks, default=-1) + 1)) - self._mp_ranks)
        missing += [os.path.basename(self._rank_path(rank)) for rank in gaps]
        if missing:
            raise CheckpointError(f"{self.folder} is not complete; missing: {', '.join(missing)}")


def layer_file(index: int, tp_rank: int) -> str:
    """The name of a layer's file."""
    return f"layer_{index:02d}-model_{tp_rank:02d}-model_states.pt"


def _matches(pattern: re.Pattern, names: List[str]) -> List[tuple]:
    return [match.groups() for match in map(pattern.fullmatch, names) if match]
