"""A checkpoint read as if it had been saved at another tensor-parallel size."""

import os
import re
from typing import Any, Dict, Iterable, List, Optional

import torch

from megatron.checkpointing.reader import CheckpointReader, LayerState
from megatron.checkpointing.shards import VOCABULARY, Shards
from megatron.checkpointing.vocabulary import resize_vocabulary
from megatron.errors import CheckpointError


class FromCheckpoint:
    """What weights read from a checkpoint and changed have in common, whatever the change."""

    reader: CheckpointReader
    model_parallel_size: int

    @property
    def folder(self) -> str:
        return self.reader.folder

    @property
    def iteration(self) -> int:
        """As recorded, else as the folder is named, else 0."""
        if self.reader.iteration is not None:
            return self.reader.iteration
        number = re.fullmatch(r"(?:global_step)?(\d+)", os.path.basename(os.path.abspath(self.folder)))
        return int(number.group(1)) if number else 0

    @property
    def args(self) -> Dict[str, Any]:
        """As CheckpointReader.args: the settings of the run that saved."""
        return self.reader.args

    def layer_indices(self, tp_rank: int = 0) -> List[int]:
        """The layers that have weights, ascending; the same on all ranks."""
        return self.reader.layer_indices(0)

    @property
    def nbytes(self) -> int:
        """About what will be written: the checkpoint's own tensors."""
        ranks = range(self.reader.model_parallel_size)
        states = (self.reader.layer_shapes(index, rank) for index in self.layer_indices() for rank in ranks)
        return sum(tensor.nbytes for state in states for tensor in state.values())

    def records(self, mp_rank: int) -> Dict[str, Any]:
        """The state of the old rank of the same number, else counted round; {} if there is none."""
        candidates = (mp_rank, mp_rank % self.reader.model_parallel_size, 0)
        source = next((rank for rank in candidates if self.reader.has_rank_state(rank)), None)
        return {} if source is None else self.reader.rank_state(source)

    def verify_layer(self, index: int) -> None:
        """As CheckpointReader.verify_layer."""
        self.reader.verify_layer(index)

    def verify(self, tp_rank: int, layers: Iterable[int]) -> None:
        """As CheckpointReader.verify, for every rank's files of these layers."""
        layers = list(layers)
        for rank in range(self.reader.model_parallel_size):
            self.reader.verify(rank, layers)


class ReshardedReader(FromCheckpoint):
    """The weights of a CheckpointReader, joined and split anew over `model_parallel_size` ranks, layer by layer.

    vocabulary_rows: the padded vocabulary to give the tables. vocab_size: the tokens in use, None if unknown.
    At the checkpoint's own size the shards are passed on untouched.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        shards: Shards,
        model_parallel_size: int,
        vocabulary_rows: int,
        vocab_size: Optional[int] = None,
    ):
        self.reader = reader
        self._shards = shards
        self.model_parallel_size = model_parallel_size
        self.vocabulary_rows = vocabulary_rows
        self._vocab_size = vocab_size
        self._joined_index: Optional[int] = None
        self._joined: LayerState = {}

    def layer_state(self, index: int, tp_rank: int = 0) -> LayerState:
        """{name: tensor} of one layer on one of the new ranks.

        Raises CheckpointError if the shards do not fit together, or cannot be split so.
        """
        ranks = self.model_parallel_size
        if ranks == self.reader.model_parallel_size:
            return self.reader.layer_state(index, tp_rank)
        whole = self.whole_layer(index)
        return {name: self._shards.piece(index, name, tensor, tp_rank, ranks) for name, tensor in whole.items()}

    def whole_layer(self, index: int) -> LayerState:
        """{name: tensor} of one layer over all ranks, with the new padding; the last one asked for is kept."""
        if self._joined_index != index:
            self._joined_index, self._joined = None, {}  # one layer in memory, not two
            self._joined = self._join(index)
            self._joined_index = index
        return self._joined

    def whole_tensor(self, index: int, name: str) -> torch.Tensor:
        """One tensor of whole_layer; the others are not read, and nothing is kept."""
        ranks = range(self.reader.model_parallel_size)
        whole = self._shards.join(index, name, [self.reader.tensor(index, name, rank) for rank in ranks])
        if not VOCABULARY.fullmatch(name):
            return whole
        return resize_vocabulary(whole, self.vocabulary_rows, self._vocab_size, f"layer {index} {name}")

    def _join(self, index: int) -> LayerState:
        states = [self.reader.layer_shapes(index, rank) for rank in range(self.reader.model_parallel_size)]
        if any(set(state) != set(states[0]) for state in states):
            raise CheckpointError(f"{self.folder}: layer {index} has other names on one rank than on another")
        return {name: self.whole_tensor(index, name) for name in states[0]}
