"""One way of reading a model's weights from each form of checkpoint.

layers       `layer_<index>-model_<tp>-model_states.pt`, one for each layer and tensor-parallel rank (pipe_parallel_size
             >= 1)
sequential   `mp_rank_<tp>_model_states.pt`, whose `module` holds `sequential.<index>.<name>` (pipe_parallel_size 0)
partitioned  `zero_pp_rank_<dp>_mp_rank_<tp>_*.pt`: as sequential, with each tensor in pieces (ZeRO stage 3)

Names of older versions become today's here, so that nothing else has to know them.
"""

import os
import re
import zipfile
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

import torch

from megatron.checkpointing.legacy import current_names, is_saved_tensor, names_before, stacks_branches
from megatron.checkpointing.pages import forget_pages
from megatron.checkpointing.safe_load import Checksums, load_file, verify_file
from megatron.checkpointing.stamp import checkpoint_config, read_stamp
from megatron.checkpointing.zero3 import PartitionedWeights, model_states_path
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
        self._last_layers: Dict[int, Tuple[int, LayerState]] = {}
        self._modules: Dict[int, Mapping[str, torch.Tensor]] = {}
        self._names: Dict[int, Dict[int, Dict[str, str]]] = {}
        self._checksums: Dict[int, Checksums] = {}
        self._checked: Set[Tuple[int, str]] = set()
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
        return sorted(self._names_by_layer(tp_rank))

    def layer_state(self, index: int, tp_rank: int = 0) -> LayerState:
        """{name: tensor} of one layer on one tensor-parallel rank; {} for a layer without weights."""
        return current_names(self._saved_layer(index, tp_rank))

    def layer_shapes(self, index: int, tp_rank: int = 0) -> LayerState:
        """As layer_state, for names, shapes and dtypes only: what would have to be joined is on the meta device."""
        saved = self._saved_layer(index, tp_rank)
        return current_names(saved.on_meta() if isinstance(saved, _Layer) else saved)

    def tensor(self, index: int, name: str, tp_rank: int = 0) -> torch.Tensor:
        """One tensor of layer_state; the others are not read. Raises KeyError."""
        saved = self._saved_layer(index, tp_rank)
        return current_names({each: saved[each] for each in names_before(name, set(saved))})[name]

    @property
    def stacks_branches(self) -> bool:
        """Whether tensors that were saved apart (mlp.w1 and w3) are read as one."""
        return any(stacks_branches(self._saved_layer(index, 0)) for index in self.layer_indices()[:2])

    def _saved_layer(self, index: int, tp_rank: int) -> Mapping[str, torch.Tensor]:
        if not self.is_layered:
            return _Layer(self._module(tp_rank), self._names_by_layer(tp_rank).get(index, {}))
        if (index, tp_rank) not in self._layer_files:
            return {}
        last = self._last_layers.get(tp_rank)
        if last is None or last[0] != index:
            last = self._last_layers[tp_rank] = (index, self._load_layer(index, tp_rank))
        return last[1]

    def _load_layer(self, index: int, tp_rank: int) -> LayerState:
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
        state = self._rank_states.get(mp_rank)  # once: another thread may release it
        if state is None:
            path = self._rank_path(mp_rank)
            state = load_file(path, mmap=True)
            if not isinstance(state, dict):
                raise CheckpointError(f"{path} holds a {type(state).__name__}, not a checkpoint")
            self._rank_states[mp_rank] = state
        return state

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

    def verify_layer(self, index: int) -> None:
        """Hold one layer of all ranks against its checksums. Raises CheckpointError.

        ZeRO stage 3 has none for a layer: all of its files are read for the first one.
        """
        for rank in range(self.model_parallel_size):
            if self.is_layered or (self.is_partitioned and index == self.layer_indices()[0]):
                self.verify(rank, [index])
            elif not self.is_partitioned:
                self._verify_tensors(rank, self._names_by_layer(rank).get(index, {}).values())

    def _verify_tensors(self, tp_rank: int, names: Iterable[str]) -> None:
        module = self._module(tp_rank)
        if tp_rank not in self._checksums:
            self._checksums[tp_rank] = Checksums(self._rank_path(tp_rank))
        for name in names:
            if (tp_rank, name) not in self._checked and isinstance(module[name], torch.Tensor):
                self._checksums[tp_rank].check(name, module[name])
                self._checked.update((tp_rank, other) for other in _in_same_memory(module, name))

    def release(self) -> None:
        """Give back the memory of file pages that were read."""
        self._last_layers = {}
        for rank in list(self._modules):
            if not self._forget_pages(rank):  # then they are given back by closing the file; it is opened anew
                self._rank_states.pop(rank, None)
                del self._modules[rank]

    def _forget_pages(self, tp_rank: int) -> bool:
        """Files of all layers stay open, because to read what is in one takes some 20 ms."""
        if self.is_partitioned or not zipfile.is_zipfile(self._rank_path(tp_rank)):  # no other file is mapped
            return False
        values = self._module(tp_rank).values()
        return forget_pages(value for value in values if isinstance(value, torch.Tensor))

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

    def _names_by_layer(self, tp_rank: int) -> Dict[int, Dict[str, str]]:
        """{layer: {name: the name in the file}} of files with more than one layer."""
        if tp_rank not in self._names:
            layers: Dict[int, Dict[str, str]] = {}
            for name in self._module(tp_rank):
                match = _SEQUENTIAL_NAME.fullmatch(name)
                if match is None:
                    raise CheckpointError(f"{self._rank_path(tp_rank)}: {name} is not named sequential.<layer>.<name>")
                layers.setdefault(int(match.group(1)), {})[match.group(2)] = name
            self._names[tp_rank] = layers
        return self._names[tp_rank]

    def _module(self, tp_rank: int) -> Mapping[str, torch.Tensor]:
        module = self._modules.get(tp_rank)  # once: another thread may release it
        if module is None:
            module = PartitionedWeights(self.folder, tp_rank) if self.is_partitioned else self._saved_module(tp_rank)
            self._modules[tp_rank] = module
        return module

    def _saved_module(self, tp_rank: int) -> LayerState:
        module = self.rank_state(tp_rank).get("module")
        if not isinstance(module, dict):
            raise CheckpointError(f"{self._rank_path(tp_rank)} holds no weights, and there are no layer files")
        return module

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


class _Layer(Mapping[str, torch.Tensor]):
    """One layer of a module with several; a tensor is taken out of the module when it is asked for."""

    def __init__(self, module: Mapping[str, torch.Tensor], names: Mapping[str, str]):
        self._module = module
        self._names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._module[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def on_meta(self) -> LayerState:
        """Shapes and dtypes, without joining anything."""
        shape_of = getattr(self._module, "on_meta", self._module.__getitem__)
        return {name: shape_of(saved) for name, saved in self._names.items()}


def _in_same_memory(module: Mapping[str, torch.Tensor], name: str) -> List[str]:
    """The names of all tensors whose memory is the same piece of the file."""
    tensors = {other: value for other, value in module.items() if isinstance(value, torch.Tensor)}
    place = module[name].untyped_storage().data_ptr()
    return [other for other, value in tensors.items() if value.untyped_storage().data_ptr() == place]


def layer_file(index: int, tp_rank: int) -> str:
    """The name of a layer's file."""
    return f"layer_{index:02d}-model_{tp_rank:02d}-model_states.pt"


def _matches(pattern: re.Pattern, names: List[str]) -> List[tuple]:
    return [match.groups() for match in map(pattern.fullmatch, names) if match]
