"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Any, Optional, Union


@dataclass
class NeoXArgsLogging:
    """TODO: what these arguments are for."""

    use_wandb: Optional[bool] = None
    """TODO."""

    wandb_group: Optional[str] = None
    """TODO."""

    wandb_run_name: Optional[str] = None
    """TODO."""

    wandb_team: Optional[str] = None
    """TODO."""

    wandb_project: str = "neox"
    """TODO."""

    wandb_host: str = "https://api.wandb.ai"
    """TODO."""

    wandb_init_all_ranks: bool = False
    """TODO."""

    git_hash: Optional[str] = None
    """TODO."""

    log_dir: Optional[str] = None
    """TODO."""

    tensorboard_dir: Optional[str] = None
    """TODO."""

    use_comet: Optional[bool] = None
    """TODO."""

    comet_workspace: Union[str, None] = None
    """TODO."""

    comet_project: Union[str, None] = None
    """TODO."""

    comet_experiment_name: Union[str, None] = None
    """TODO."""

    comet_tags: Union[list, None] = None
    """TODO."""

    comet_others: Union[dict, None] = None
    """TODO."""

    comet_experiment: Any = None
    """TODO."""

    peak_theoretical_tflops: Optional[float] = None
    """TODO."""

    log_interval: int = 100
    """TODO."""

    log_grad_pct_zeros: bool = False
    """TODO."""

    log_param_norm: bool = False
    """TODO."""

    log_grad_norm: bool = False
    """TODO."""

    log_optimizer_states: bool = False
    """TODO."""

    log_gradient_noise_scale: bool = False
    """TODO."""

    gradient_noise_scale_n_batches: int = 5
    """TODO."""

    gradient_noise_scale_cpu_offload: bool = False
    """TODO."""

    memory_profiling: bool = False
    """TODO."""

    memory_profiling_path: Optional[str] = None
    """TODO."""

    profile: bool = False
    """TODO."""

    profile_step_start: int = 10
    """TODO."""

    profile_step_stop: int = 12
    """TODO."""
