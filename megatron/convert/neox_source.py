"""A checkpoint of ours, or GPT-NeoX's, read as whole (undivided) parameters, layer by layer."""

from functools import cached_property
from typing import Dict, List, Sequence, Tuple

import torch

from megatron.checkpointing.buffers import Buffers
from megatron.checkpointing.legacy import is_extra_state, is_unused_buffer
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.resharded import ReshardedReader
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.te_names import conversion_hints
from megatron.convert.memory import give_back
from megatron.convert.rules import Line

Names = Dict[Tuple[int, str], Line]

_MOST_MAPPED = 1 << 27
"""Bytes read before the pages that they are in are given back: the system maps them again for what comes next."""


class NeoXSource:
    """The weights that `lines` ask for. Every tensor-parallel rank's share is checked before anything is read."""

    def __init__(self, reader: CheckpointReader, neox_args, lines: Sequence[Line]):
        self._reader = reader
        self._shards = Shards(neox_args, empty=Buffers().empty)
        self._weights = ReshardedReader(reader, self._shards, 1, neox_args.padded_vocab_size)
        self._bytes_read = 0
        self._lines: Names = {(line.index, line.ours): line for line in lines}

    def problems(self) -> List[str]:
        """Every missing, leftover or differently shaped tensor, as lines; what no result depends on is left out."""
        problems: List[str] = []
        found, wanted = [], [line.ours for line in self._lines.values()]
        ranks = self._reader.model_parallel_size
        for rank in range(ranks):
            shapes = self._shapes(rank)
            found += [name for _, name in shapes]
            for key in sorted(set(shapes) | set(self._lines)):
                problems += self._problem(key, shapes.get(key), rank, ranks)
        return conversion_hints(found, wanted) + list(dict.fromkeys(problems))

    def read(self, line: Line) -> torch.Tensor:
        """A whole parameter. Raises CheckpointError if the ranks' shares do not fit together or are damaged."""
        whole = self._weights.whole_tensor(line.index, line.ours)
        self._bytes_read += whole.nbytes
        return whole

    def verify(self, index: int) -> None:
        """Hold a layer against its checksums. Raises CheckpointError."""
        self._weights.verify_layer(index)

    def release(self) -> None:
        """Call between layers: gives back memory, that of file pages once there is much of it."""
        give_back()
        if self._bytes_read > _MOST_MAPPED:
            self._reader.release()
            self._bytes_read = 0

    @cached_property
    def dtypes(self) -> Dict[Line, torch.dtype]:
        """Of each parameter, on rank 0."""
        return {
            self._lines[index, name]: tensor.dtype
            for index in self._weights.layer_indices()
            for name, tensor in self._reader.layer_shapes(index, 0).items()
            if (index, name) in self._lines
        }

    def _shapes(self, rank: int) -> Dict[Tuple[int, str], Tuple[int, ...]]:
        return {
            (index, name): tuple(tensor.shape)
            for index in self._weights.layer_indices()
            for name, tensor in self._reader.layer_shapes(index, rank).items()
            if not is_unused_buffer(name) and not is_extra_state(name)
        }

    def _problem(self, key: Tuple[int, str], shape, rank: int, ranks: int) -> List[str]:
        where = f"layer {key[0]} {key[1]}"
        if key not in self._lines:
            return [f"{where}: in the checkpoint, but there is no such parameter in this model"]
        if shape is None:
            return [f"{where}: missing in the checkpoint"]
        wanted = tuple(self._shards.piece(*key, whole_on_meta(self._lines[key]), rank, ranks).shape)
        if shape != wanted:
            return [f"{where}: shape {list(shape)} in the checkpoint, {list(wanted)} by the config"]
        return []


def whole_on_meta(line: Line) -> torch.Tensor:
    """Our parameter as a tensor without memory: its shape follows from theirs."""
    theirs = [torch.empty(shape, device="meta") for shape in line.shapes]
    return line.operation.merge(theirs, line.widths)
