"""What generation and evaluation change in a training config."""

from typing import Any, Dict, Mapping

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


def without_fp8(values: Mapping[str, Any]) -> Dict[str, Any]:
    """The settings with FP8 off: it needs tokens in multiples of 16, and text is generated one at a time.

    te_fp8_mha includes te_mha, by whose names the weights are known.
    """
    others = {name: value for name, value in values.items() if not name.startswith("te_fp8_")}
    return {**others, "te_mha": True} if values.get("te_fp8_mha") else others
