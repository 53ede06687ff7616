"""A checkpoint written anew for another number of tensor-parallel ranks and pipeline stages: weights, no optimizer."""

import os
import shutil
from contextlib import ExitStack
from typing import Any, Dict, List, Mapping, Optional, Protocol

from tqdm import tqdm

from megatron.checkpointing import folders
from megatron.checkpointing.config_texts import with_settings
from megatron.checkpointing.reader import LayerState, layer_file
from megatron.checkpointing.stamp import write_stamp
from megatron.checkpointing.streamed_file import StreamedFile, save_file, sync_files
from megatron.errors import CheckpointError

LAYOUT_FILE = "layout.yml"
"""In `configs/`: the parallel sizes, where none of the model's own files sets them."""

_OF_THE_OPTIMIZER = ("optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments")
_EMPTY_STATE = {
    "buffer_names": [],
    "shared_params": None,
    "lr_scheduler": None,
    "data_sampler": None,
    "random_ltd": None,
    "skipped_steps": 0,
    "global_steps": 0,
    "global_samples": 0,
    "dp_world_size": 1,
    "ds_config": {},
}
"""What DeepSpeed looks up, for a checkpoint made by a converter, which may lack it."""


class Weights(Protocol):
    """What is written: a model split over ranks, read layer by layer."""

    folder: str
    """Where it comes from, for messages."""
    model_parallel_size: int
    vocabulary_rows: int
    iteration: int
    nbytes: int
    """Of all that will be written, for the progress bar."""

    def layer_indices(self) -> List[int]:
        """The layers that have weights, ascending."""

    def layer_state(self, index: int, tp_rank: int) -> LayerState:
        """{name: tensor} of one layer on one rank; asked for layer by layer, and within a layer rank by rank."""

    def verify_layer(self, index: int) -> None:
        """Hold what layer_state will read against its checksums; called before it. Raises CheckpointError."""

    def records(self, mp_rank: int) -> Dict[str, Any]:
        """The rest of an `mp_rank` file: DeepSpeed's state, `args`, random states, as far as there is any."""


def write_resharded(
    weights: Weights, neox_args, out: str, pipe_parallel_size: int, configs: Mapping[str, str], progress: bool = True
) -> str:
    """Write `weights` as `out`/global_step<N>, with `latest`; returns that folder.

    Files, keys and names are GPT-NeoX's. Layer by layer: no more than one layer, joined and split, is in memory.
    pipe_parallel_size 0 makes sequential `mp_rank` files, more makes layer files. The optimizer's state is left out.
    neox_args describe the model; configs are the texts of its YAML files, by name.

    Raises CheckpointError, leaving nothing behind, if `out` has something in it or the weights cannot be split so.
    """
    stages = max(pipe_parallel_size, 1)
    with _new_folder(out, weights.iteration) as unfinished:
        with tqdm(
            total=weights.nbytes, unit="B", unit_scale=True, dynamic_ncols=True, desc="weights", disable=not progress
        ) as bar:
            write = _write_layers if pipe_parallel_size else _write_sequential
            write(weights, unfinished, bar)
        if pipe_parallel_size:
            for mp_rank in range(stages * weights.model_parallel_size):
                save_file(_rank_state(weights, mp_rank, stages, None), _rank_path(unfinished, mp_rank))
        sync_files(unfinished)
        write_stamp(neox_args, unfinished)
        _write_configs(unfinished, configs, weights.model_parallel_size, pipe_parallel_size)
        folders.publish(out, weights.iteration)
    return os.path.join(out, folders.tag_of(weights.iteration))


class _new_folder:
    """The folder to write to, under a name that no loader takes; gone again after an error."""

    def __init__(self, out: str, iteration: int):
        folders.refuse_patterns("OUT", out)
        self._out = out
        self._created = not os.path.isdir(out)
        self._path = os.path.join(out, folders.saving_tag(iteration))
        if not self._created:
            folders.recover(out)
            if os.listdir(out):
                raise CheckpointError(f"{out} exists and is not empty; name a new folder, nothing is overwritten")

    def __enter__(self) -> str:
        os.makedirs(self._path)
        return self._path

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            if self._created and not os.listdir(self._out):
                os.rmdir(self._out)


def _write_layers(weights: Weights, folder: str, bar: tqdm) -> None:
    """One file for each layer and rank."""
    for index in weights.layer_indices():
        weights.verify_layer(index)  # just before it is read for use, so that the disk is read once
        for rank in range(weights.model_parallel_size):
            bar.update(_write_layer(weights.layer_state(index, rank), os.path.join(folder, layer_file(index, rank))))


def _write_layer(state: LayerState, path: str) -> int:
    """Returns the bytes. The layer is not kept: the next one is read without this one in memory."""
    save_file(state, path)
    return sum(tensor.nbytes for tensor in state.values())


def _write_sequential(weights: Weights, folder: str, bar: tqdm) -> None:
    """One file for each rank, all written at the same time."""
    ranks = range(weights.model_parallel_size)
    with ExitStack() as stack:
        files = [stack.enter_context(StreamedFile(_rank_path(folder, rank))) for rank in ranks]
        modules: List[Dict[str, Any]] = [{} for _ in ranks]
        for index in weights.layer_indices():
            weights.verify_layer(index)
            for rank in ranks:
                bar.update(_add_layer(weights.layer_state(index, rank), index, files[rank], modules[rank]))
        for rank in ranks:
            files[rank].finish(_rank_state(weights, rank, 1, modules[rank]))


def _add_layer(state: LayerState, index: int, file: StreamedFile, module: Dict[str, Any]) -> int:
    """Returns the bytes. As with _write_layer, nothing is kept: the next rank's share is made without this one."""
    for name, tensor in state.items():
        module[f"sequential.{index}.{name}"] = file.add(tensor)
    return sum(tensor.nbytes for tensor in state.values())


def _rank_path(folder: str, mp_rank: int) -> str:
    return os.path.join(folder, f"mp_rank_{mp_rank:02d}_model_states.pt")


def _rank_state(weights: Weights, mp_rank: int, stages: int, module: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """DeepSpeed's state and GPT-NeoX's records."""
    ranks = weights.model_parallel_size
    state = {**_EMPTY_STATE, **weights.records(mp_rank)}
    state.pop("checkpoint_validation_logits", None)
    state.update(dict.fromkeys(_OF_THE_OPTIMIZER), module=module, mp_world_size=ranks)
    state["checkpoint_parallel_dimensions"] = {"pp_degree": stages, "tp_degree": ranks}
    state["args"] = _args(weights, state.get("args") or {})
    state["iteration"] = weights.iteration
    return state


def _args(weights: Weights, saved: Dict[str, Any]) -> Dict[str, Any]:
    """GPT-NeoX compares what it finds: recorded sizes become the new ones, and none is added."""
    new = {"model_parallel_size": weights.model_parallel_size, "padded_vocab_size": weights.vocabulary_rows}
    return {**saved, **{key: value for key, value in new.items() if key in saved}}


def _write_configs(folder: str, texts: Mapping[str, str], model_parallel_size: int, pipe_parallel_size: int) -> None:
    """The model's YAML files with the new parallel sizes in them, otherwise untouched."""
    os.makedirs(os.path.join(folder, "configs"))
    sizes = {"model_parallel_size": model_parallel_size, "pipe_parallel_size": pipe_parallel_size}
    kept = {name: text for name, text in texts.items() if name != LAYOUT_FILE}
    for name, text in with_settings(kept, sizes, LAYOUT_FILE).items():
        _write_text(os.path.join(folder, "configs", name), text)
    folders.sync_folder(os.path.join(folder, "configs"))


def _write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
