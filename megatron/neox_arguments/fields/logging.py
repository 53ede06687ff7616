"""What is reported, and where to."""

from dataclasses import dataclass
from typing import Any, Optional, Union


@dataclass
class NeoXArgsLogging:
    """Weights & Biases, TensorBoard, Comet, extra measurements, profiling."""

    use_wandb: Optional[bool] = None
    """Log to Weights & Biases; needs the wandb package and an account or offline mode. Null or false: off."""

    wandb_group: Optional[str] = None
    """Group under which the run is filed, so that several ranks or restarts appear together."""

    wandb_run_name: Optional[str] = None
    """Name of the run; with `wandb_init_all_ranks` the rank is added. Null: Weights & Biases invents one."""

    wandb_team: Optional[str] = None
    """Team or user the run belongs to. Null: the logged-in user."""

    wandb_project: str = "neox"
    """Project the run belongs to."""

    wandb_host: str = "https://api.wandb.ai"
    """Address of the Weights & Biases server."""

    wandb_init_all_ranks: bool = False
    """Start a run in every process instead of only in rank 0."""

    git_hash: Optional[str] = None
    """Commit of the code, as a label kept with the configuration. Nothing is computed from it."""

    log_dir: Optional[str] = None
    """Folder for the console output, `train_log.jsonl` and `loss_curve.png`. Null: the log and the curve go to the
    folder of `save`; without either nothing is written."""

    tensorboard_dir: Optional[str] = None
    """Folder for TensorBoard files; needs the tensorboard package. Null: none are written."""

    use_comet: Optional[bool] = None
    """Log to Comet. Refused unless null or false: not built."""

    comet_workspace: Union[str, None] = None
    """Comet workspace. Refused unless null: not built."""

    comet_project: Union[str, None] = None
    """Comet project. Refused unless null: not built."""

    comet_experiment_name: Union[str, None] = None
    """Name of the Comet experiment. Refused unless null: not built."""

    comet_tags: Union[list, None] = None
    """Tags of the Comet experiment. Refused unless null: not built."""

    comet_others: Union[dict, None] = None
    """Further Comet metadata. Refused unless null: not built."""

    comet_experiment: Any = None
    """GPT-NeoX keeps its running Comet experiment here. Refused unless null: not built."""

    peak_theoretical_tflops: Optional[float] = None
    """Peak TFLOP/s of one device; when set, the share of it that is reached is logged too. Null: not logged."""

    log_interval: int = 100
    """Training iterations between lines of the log; losses and times in a line are means over them. The extra figures
    asked for by `log_grad_norm` and its kin are computed for these iterations only."""

    log_grad_pct_zeros: bool = False
    """Log which share of each parameter's gradient is exactly zero."""

    log_param_norm: bool = False
    """Log the L2 norm of each parameter."""

    log_grad_norm: bool = False
    """Log the L2 norm of each parameter's gradient."""

    log_optimizer_states: bool = False
    """Log the L2 norm of each kind of optimizer state, over the share of rank 0."""

    log_head_diagnostics: Optional[int] = None
    """Every so many steps, log what each attention head does: size and entropy of its scores, effective ranks, gradient
    norm, and what is unusual about them. Written to head_diagnostics.jsonl and .png in `log_dir` (or `save`), and to
    TensorBoard and W&B where those are used. It costs such a step a look at one sequence of up to 256 tokens. Null:
    never. Not with `te_mha`, which does not show its queries."""

    log_gradient_noise_scale: bool = False
    """Estimate the gradient noise scale. Refused unless false: not built."""

    gradient_noise_scale_n_batches: int = 5
    """Batches per estimate. Refused unless default: not built."""

    gradient_noise_scale_cpu_offload: bool = False
    """Keep the estimate's buffers on the CPU. Refused unless default: not built."""

    memory_profiling: bool = False
    """Record a snapshot of device memory. Refused unless false: not built."""

    memory_profiling_path: Optional[str] = None
    """Where that snapshot goes. Refused unless null: not built."""

    profile: bool = False
    """Record a trace with torch's profiler, written to `tensorboard_dir`, else to the run's folder. Steps are counted
    from the start of the process, not of the training."""

    profile_step_start: int = 10
    """Steps before the traced ones when `profile` is true; at least 1, because one warms the profiler up."""

    profile_step_stop: int = 12
    """Last traced step when `profile` is true."""
