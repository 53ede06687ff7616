"""A checkpoint with adapters read as one without: each is in the weight that it adapts."""

import torch

from megatron.checkpointing.adapters import check_adapters
from megatron.checkpointing.reader import CheckpointReader, LayerState
from megatron.checkpointing.resharded import FromCheckpoint
from megatron.checkpointing.shards import Shards
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER
from megatron.model.lora import is_adapter, merged, row_parts
from megatron.neox_arguments.lora import lora_settings


class MergedReader(FromCheckpoint):
    """The weights of a CheckpointReader with its adapters merged, layer by layer, rank by rank.

    neox_args: the model as saved, at the checkpoint's number of ranks. Raises CheckpointError for a checkpoint without
    adapters, or with others than `lora` says.
    """

    def __init__(self, reader: CheckpointReader, neox_args):
        check_adapters(reader, neox_args)
        self.reader = reader
        self.model_parallel_size = reader.model_parallel_size
        self.vocabulary_rows = neox_args.padded_vocab_size
        self._neox_args, self._scale = neox_args, lora_settings(neox_args).scale
        self._shards = Shards(neox_args)

    @property
    def nbytes(self) -> int:
        """As FromCheckpoint.nbytes, without the adapters."""
        ranks = range(self.model_parallel_size)
        states = (self.reader.layer_shapes(index, rank) for index in self.layer_indices() for rank in ranks)
        return sum(tensor.nbytes for state in states for name, tensor in state.items() if not is_adapter(name))

    def layer_state(self, index: int, tp_rank: int = 0) -> LayerState:
        """{name: tensor} of one layer on one rank."""
        saved = self.reader.layer_state(index, tp_rank)
        return {name: self._merged(saved, index, name, tp_rank) for name in saved if not is_adapter(name)}

    def _merged(self, saved: LayerState, index: int, name: str, tp_rank: int) -> torch.Tensor:
        layer = name.removesuffix(".weight")
        if f"{layer}.lora.A" not in saved:
            return saved[name]
        parts = row_parts(self._neox_args, layer.rpartition(".")[2], index - FIRST_TRANSFORMER_LAYER)
        if parts is not None:
            parts = self._shards.piece(index, name, parts, tp_rank, self.model_parallel_size)
        return merged(saved[name], saved[f"{layer}.lora.A"], saved[f"{layer}.lora.B"], self._scale, parts)
