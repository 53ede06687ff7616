"""Checkpoints in GPT-NeoX's layout: saving, resuming, and reading weights."""

from megatron.checkpointing.load import load_checkpoint
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.save import save_checkpoint
from megatron.checkpointing.stamp import check_stamp, read_stamp, write_stamp
from megatron.checkpointing.weights import load_model_weights

__all__ = [
    "CheckpointReader",
    "check_stamp",
    "load_checkpoint",
    "load_model_weights",
    "read_stamp",
    "save_checkpoint",
    "write_stamp",
]
