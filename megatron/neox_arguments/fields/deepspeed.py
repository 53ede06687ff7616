"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class NeoXArgsDeepspeedConfig:
    """TODO: what these arguments are for."""

    deepspeed: bool = True
    """TODO."""

    train_batch_size: Optional[int] = None
    """TODO."""

    train_micro_batch_size_per_gpu: Optional[int] = None
    """TODO."""

    gradient_accumulation_steps: int = 1
    """TODO."""

    optimizer: Optional[dict] = None
    """TODO."""

    scheduler: Optional[dict] = None
    """TODO."""

    fp32_allreduce: bool = False
    """TODO."""

    prescale_gradients: bool = False
    """TODO."""

    gradient_predivide_factor: float = 1.0
    """TODO."""

    sparse_gradients: bool = False
    """TODO."""

    fp16: Optional[dict] = None
    """TODO."""

    bf16: Optional[dict] = None
    """TODO."""

    amp: Optional[dict] = None
    """TODO."""

    gradient_clipping: float = 1.0
    """TODO."""

    zero_optimization: Optional[dict] = None
    """TODO."""

    curriculum_learning: Optional[dict] = None
    """TODO."""

    curriculum_seqlen: int = 0
    """TODO."""

    steps_per_print: int = 10
    """TODO."""

    wall_clock_breakdown: bool = False
    """TODO."""

    dump_state: bool = False
    """TODO."""

    flops_profiler: Optional[dict] = None
    """TODO."""

    communication_data_type: Optional[bool] = None
    """TODO."""

    autotuning: Optional[dict] = None
    """TODO."""

    activation_checkpointing: Optional[dict] = None
    """TODO."""

    sparse_attention: Optional[dict] = None
    """TODO."""

    data_efficiency: Optional[dict] = None
    """TODO."""

    tensorboard: Optional[dict] = None
    """TODO."""

    wandb: Optional[dict] = None
    """TODO."""

    csv_monitor: Optional[dict] = None
    """TODO."""

    elasticity: Optional[dict] = None
    """TODO."""

    comms_logger: Optional[dict] = None
    """TODO."""

    compression_training: Optional[dict] = None
    """TODO."""

    checkpoint: Optional[dict] = None
    """TODO."""

    data_types: Optional[dict] = None
    """TODO."""

    deepspeed_extra_args: Optional[dict] = None
    """TODO."""
