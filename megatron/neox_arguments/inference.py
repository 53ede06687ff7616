"""What generation and evaluation change in a training config."""

from typing import Any, Dict

INFERENCE_OVERRIDES: Dict[str, Any] = {
    "checkpoint_activations": False,
    "partition_activations": False,
    "contiguous_checkpointing": False,
    "checkpoint_in_cpu": False,
    "no_load_optim": True,
    "optimizer": None,
    "scheduler": None,
    "zero_optimization": None,
}
"""No gradients are taken, so nothing is recomputed, and no optimizer is built or loaded."""
