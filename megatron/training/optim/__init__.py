"""Optimizers that torch does not have, written from their papers."""

from megatron.training.optim.lion import Lion
from megatron.training.optim.madgrad import MadgradWD
from megatron.training.optim.sm3 import SM3

__all__ = ["Lion", "MadgradWD", "SM3"]
