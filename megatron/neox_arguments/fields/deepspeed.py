"""Settings of DeepSpeed's own configuration."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class NeoXArgsDeepspeedConfig:
    """Settings under DeepSpeed's own names; set ones go into the dictionary given to `deepspeed.initialize`."""

    deepspeed: bool = True
    """Train through DeepSpeed. Only true is accepted: there is no other engine."""

    train_batch_size: Optional[int] = None
    """Sequences per optimizer step over the whole run: micro batch x accumulation steps x data-parallel size. Null:
    computed from the other two. All three must agree."""

    train_micro_batch_size_per_gpu: Optional[int] = None
    """Sequences in one forward pass of one model replica. Null: computed from `train_batch_size` and
    `gradient_accumulation_steps`."""

    gradient_accumulation_steps: int = 1
    """Micro batches whose gradients are added up before one optimizer step; with a pipeline this is also how many micro
    batches fill it. Left out or null: what follows from the two batch sizes where both are given, else 1. In
    GPT-NeoX a left-out value counts as 1, and only null follows."""

    optimizer: Optional[dict] = None
    """The optimizer as `{type: ..., params: {lr: ..., betas: ..., eps: ...}}`. `type` is one of the choices of
    `optimizer_type`, in any letter case; weight decay is its own argument. Null: Adam with lr 0.001; generation uses no
    optimizer at all."""

    scheduler: Optional[dict] = None
    """A learning-rate scheduler in DeepSpeed's form. Refused unless null: `lr_decay_style`, `warmup` and `min_lr` set
    the learning rate, so it would be ignored."""

    fp32_allreduce: bool = False
    """Take the sums over tensor-parallel ranks in fp32, whatever the type of the activations. It changes results for
    half-precision models on several ranks only."""

    prescale_gradients: bool = False
    """Divide gradients by the data-parallel size before they are summed over replicas instead of after. DeepSpeed does
    not allow it together with ZeRO 2 or 3 and reduce-scatter."""

    gradient_predivide_factor: float = 1.0
    """Part of the division by the data-parallel size that is done before the sum, to keep fp16 gradients of large runs
    in range. DeepSpeed allows only 1.0 together with ZeRO 2 or 3 and reduce-scatter."""

    sparse_gradients: bool = False
    """Send embedding gradients in sparse form. Refused: DeepSpeed 0.19 has removed it."""

    fp16: Optional[dict] = None
    """DeepSpeed's fp16 block: `enabled`, `loss_scale` (0 means dynamic), `loss_scale_window`, `initial_scale_power`,
    `hysteresis`, `min_loss_scale`. Setting `precision: fp16` alone switches it on with DeepSpeed's defaults. A key
    `type` in it is not looked at, as in GPT-NeoX."""

    bf16: Optional[dict] = None
    """DeepSpeed's bf16 block; `{enabled: true}` is the same as `precision: bfloat16`. No loss scaling is involved.
    Conflicts with fp16."""

    amp: Optional[dict] = None
    """NVIDIA Apex mixed precision. Refused unless null: DeepSpeed 0.19 has removed it; use `precision`."""

    gradient_clipping: float = 1.0
    """Largest global L2 norm of the gradients; a longer gradient is scaled down to it before the optimizer step. 0
    switches clipping off."""

    zero_optimization: Optional[dict] = None
    """DeepSpeed's ZeRO block: `stage` 0 to 3 and its details. Stage 1 shards optimizer states over data-parallel ranks,
    2 gradients as well, 3 parameters as well; with pipe_parallel_size >= 1 only 0 and 1 work. Null: stage 0."""

    curriculum_learning: Optional[dict] = None
    """Training on short sequences first. Refused unless null: DeepSpeed 0.19 has removed the form that GPT-NeoX uses.
    """

    curriculum_seqlen: int = 0
    """GPT-NeoX's counter of the present curriculum length. Refused unless default, like `curriculum_learning`."""

    steps_per_print: int = 10
    """Number of optimizer steps between DeepSpeed's own reports of timers, loss and speed. They appear only with
    `wall_clock_breakdown` or `dump_state`; the training log has its own `log_interval`."""

    wall_clock_breakdown: bool = False
    """Time forward, backward, gradient reduction and optimizer step separately and report them. Synchronises the
    device, so steps get slower."""

    dump_state: bool = False
    """Let DeepSpeed print its configuration and state when the engine is built. Its log level is set to info for
    that, unless `deepspeed_extra_args` names another one."""

    flops_profiler: Optional[dict] = None
    """DeepSpeed's per-module profiler: `enabled`, `profile_step`, `module_depth`, `top_modules`, `detailed`,
    `output_file`. Its counts are estimates by module; the log's TFLOP/s come from the exact widths instead. Refused
    with pipe_parallel_size >= 1, where DeepSpeed never reports."""

    communication_data_type: Optional[bool] = None
    """Data type of the gradient sums. Typed true/false in GPT-NeoX, which DeepSpeed cannot read, so it is refused
    unless null; give `deepspeed_extra_args: {communication_data_type: fp32}` (or fp16, bf16)."""

    autotuning: Optional[dict] = None
    """DeepSpeed's search for batch and ZeRO settings. Refused unless null or disabled: not built."""

    activation_checkpointing: Optional[dict] = None
    """DeepSpeed's block of that name. Refused unless null, because it would be ignored: the flat arguments
    `partition_activations`, `contiguous_checkpointing`, `checkpoint_in_cpu`, `synchronize_each_layer` and
    `profile_backward` say the same."""

    sparse_attention: Optional[dict] = None
    """DeepSpeed's sparse-attention block. Refused unless null: DeepSpeed 0.19 has removed it."""

    data_efficiency: Optional[dict] = None
    """DeepSpeed's data sampling and random token dropping. Refused unless null or disabled: the data loaders here do
    not go through DeepSpeed."""

    tensorboard: Optional[dict] = None
    """DeepSpeed's own TensorBoard writer, e.g. `{enabled: true, output_path: ..., job_name: ...}`. Independent of
    `tensorboard_dir`, which is the training log's."""

    wandb: Optional[dict] = None
    """DeepSpeed's own Weights & Biases writer, e.g. `{enabled: true, project: ...}`. Independent of `use_wandb`, which
    is the training log's."""

    csv_monitor: Optional[dict] = None
    """DeepSpeed's writer of CSV files, e.g. `{enabled: true, output_path: ..., job_name: ...}`."""

    elasticity: Optional[dict] = None
    """Batch sizes that adapt to a changing number of workers. Refused unless null or disabled: DeepSpeed 0.19 has
    removed it."""

    comms_logger: Optional[dict] = None
    """DeepSpeed's log of collective operations: `enabled`, `verbose`, `prof_all`, `debug`. Only with `verbose: true`
    is anything shown. DeepSpeed's log level is set to info for it, unless `deepspeed_extra_args` names another one."""

    compression_training: Optional[dict] = None
    """Quantisation and pruning during training. Refused unless null: DeepSpeed 0.19 has removed it."""

    checkpoint: Optional[dict] = None
    """DeepSpeed's checkpoint block. Only `tag_validation` (Ignore, Warn or Fail: what to do when ranks disagree on the
    name of a checkpoint) can be set; the other keys are refused, because saving here has its own layout."""

    data_types: Optional[dict] = None
    """DeepSpeed's data types, chiefly `grad_accum_dtype`: the type in which gradients of several micro batches are
    added, e.g. fp32 with bfloat16 and ZeRO. Null: the type of the gradients."""

    deepspeed_extra_args: Optional[dict] = None
    """Further keys for DeepSpeed's configuration, merged last, for settings that have no argument of their own. A key
    that is an argument as well must be given there instead."""
