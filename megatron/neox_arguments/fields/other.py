"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class NeoXArgsOther:
    """TODO: what these arguments are for."""

    distributed_backend: str = "nccl"
    """TODO."""

    local_rank: Optional[int] = None
    """TODO."""

    rank: Optional[int] = None
    """TODO."""

    lazy_mpu_init: bool = False
    """TODO."""

    short_seq_prob: float = 0.1
    """TODO."""

    eod_mask_loss: bool = False
    """TODO."""

    adlr_autoresume: bool = False
    """TODO."""

    adlr_autoresume_interval: int = 1000
    """TODO."""

    seed: int = 1234
    """TODO."""

    onnx_safe: bool = False
    """TODO."""

    deepscale: bool = False
    """TODO."""

    deepscale_config: Optional[str] = None
    """TODO."""

    deepspeed_mpi: bool = False
    """TODO."""

    deepspeed_slurm: bool = False
    """TODO."""

    user_script: Optional[str] = None
    """TODO."""

    iteration: Optional[int] = None
    """TODO."""

    do_train: Optional[bool] = None
    """TODO."""

    do_valid: Optional[bool] = None
    """TODO."""

    do_test: Optional[bool] = None
    """TODO."""

    global_num_gpus: Optional[int] = None
    """TODO."""
