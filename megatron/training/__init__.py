"""From a config to a trained model."""

from megatron.training.batch import get_batch
from megatron.training.engine import setup_model_and_optimizer
from megatron.training.evaluation import evaluate
from megatron.training.learning_rates import AnnealingLR
from megatron.training.optimizers import get_optimizer
from megatron.training.run import pretrain
from megatron.training.step import train_step

__all__ = [
    "AnnealingLR",
    "evaluate",
    "get_batch",
    "get_optimizer",
    "pretrain",
    "setup_model_and_optimizer",
    "train_step",
]
