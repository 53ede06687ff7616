"""A checkpoint written anew for another number of tensor-parallel ranks and pipeline stages: weights, no optimizer."""

import os
import re
import shutil
from typing import Any, Dict, Iterator, Mapping, Optional

import torch
from tqdm import tqdm

from megatron.checkpointing import folders
from megatron.checkpointing.config_texts import with_settings
from megatron.checkpointing.reader import CheckpointReader, LayerState, layer_file
from megatron.checkpointing.resharded import ReshardedReader
from megatron.checkpointing.safe_load import load_file, save_file
from megatron.checkpointing.stamp import write_stamp
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


def write_resharded(
    weights: ReshardedReader, neox_args, out: str, pipe_parallel_size: int, configs: Mapping[str, str]
) -> str:
    """Write `weights` as `out`/global_step<N>, with `latest`; returns that folder.

    Files, keys and names are GPT-NeoX's. Layer by layer: no more than one layer, joined and split, is in memory.
    pipe_parallel_size 0 makes sequential `mp_rank` files, more makes layer files. The optimizer's state is left out.
    neox_args describe the model; configs are the texts of its YAML files, by name.

    Raises CheckpointError, leaving nothing behind, if `out` has something in it or the weights cannot be split so.
    """
    iteration = _iteration(weights.reader)
    with _new_folder(out, iteration) as unfinished:
        stages = max(pipe_parallel_size, 1)
        layers = unfinished if pipe_parallel_size else os.path.join(unfinished, "layers")
        os.makedirs(layers, exist_ok=True)
        _write_layers(weights, layers)
        for mp_rank in range(stages * weights.model_parallel_size):
            module = None if pipe_parallel_size else _sequential_module(layers, weights, mp_rank)
            _write_rank(weights, unfinished, mp_rank, stages, module)
        if not pipe_parallel_size:
            shutil.rmtree(layers)
        write_stamp(neox_args, unfinished)
        _write_configs(unfinished, configs, weights.model_parallel_size, pipe_parallel_size)
        folders.publish(out, iteration)
    return os.path.join(out, folders.tag_of(iteration))


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


def _write_layers(weights: ReshardedReader, folder: str) -> None:
    indices = weights.layer_indices()
    if not weights.reader.is_layered:
        weights.verify(0, indices)
    with tqdm(total=len(indices) * weights.model_parallel_size, desc="layers", unit="file", dynamic_ncols=True) as bar:
        for index in indices:
            if weights.reader.is_layered:  # just before it is read for use, so that the disk is read once
                weights.verify(0, [index])
            for rank in range(weights.model_parallel_size):
                state = weights.layer_state(index, rank)
                save_file(dict(_of_their_own(state)), os.path.join(folder, layer_file(index, rank)))
                bar.update()


def _of_their_own(state: LayerState) -> Iterator[tuple]:
    """A tensor that is a part of a larger one would be written with all of it."""
    for name, tensor in state.items():
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        yield name, tensor if whole else tensor.contiguous().clone()


def _sequential_module(layers: str, weights: ReshardedReader, rank: int) -> LayerState:
    """All weights of a rank, still on disk: in memory they would be a whole model."""
    module: LayerState = {}
    for index in weights.layer_indices():
        state = load_file(os.path.join(layers, layer_file(index, rank)), mmap=True)
        module.update({f"sequential.{index}.{name}": tensor for name, tensor in state.items()})
    return module


def _write_rank(
    weights: ReshardedReader, folder: str, mp_rank: int, stages: int, module: Optional[Dict[str, torch.Tensor]]
) -> None:
    """DeepSpeed's state and GPT-NeoX's records, from the old rank of the same number, else counted round."""
    reader, ranks = weights.reader, weights.model_parallel_size
    source = next((r for r in (mp_rank, mp_rank % reader.model_parallel_size, 0) if reader.has_rank_state(r)), None)
    state = {**_EMPTY_STATE, **({} if source is None else reader.rank_state(source))}
    state.pop("checkpoint_validation_logits", None)
    state.update(dict.fromkeys(_OF_THE_OPTIMIZER), module=module, mp_world_size=ranks)
    state["checkpoint_parallel_dimensions"] = {"pp_degree": stages, "tp_degree": ranks}
    state["args"] = _args(weights, state.get("args") or {})
    state["iteration"] = _iteration(reader)
    save_file(state, os.path.join(folder, f"mp_rank_{mp_rank:02d}_model_states.pt"))


def _args(weights: ReshardedReader, saved: Dict[str, Any]) -> Dict[str, Any]:
    """GPT-NeoX compares what it finds: recorded sizes become the new ones, and none is added."""
    new = {"model_parallel_size": weights.model_parallel_size, "padded_vocab_size": weights.vocabulary_rows}
    return {**saved, **{key: value for key, value in new.items() if key in saved}}


def _iteration(reader: CheckpointReader) -> int:
    """As recorded, else as the folder is named, else 0."""
    if reader.iteration is not None:
        return reader.iteration
    number = re.fullmatch(r"(?:global_step)?(\d+)", os.path.basename(os.path.abspath(reader.folder)))
    return int(number.group(1)) if number else 0


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
