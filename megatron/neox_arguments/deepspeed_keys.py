"""The keys DeepSpeed 0.19 knows in those of its sections where it refuses any other.

Kept here so that a misspelt key is found before any process starts; a test compares them with DeepSpeed's own.
"""

from typing import Any, Iterator

from megatron.neox_arguments.loading import nearest

_MONITOR = "enabled output_path job_name"
_STAGE_3 = """
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
    max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params
    allgather_sequential
"""
KEYS = {
    name: tuple(text.split())
    for name, text in {
        "fp16": """
            enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
            min_loss_scale fp16_master_weights_and_grads
        """,
        "bf16": """
            enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
        """,
        "zero_optimization": """
            stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
            allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
            elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
            cpu_offload_use_pin_memory cpu_offload stage3_gather_fp16_weights_on_model_save ignore_unused_parameters
            legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights
            zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
            pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
            save_muon_momentum_buffer_in_memory leaf_module
        """
        + " ".join(f"stage3_{key}" for key in _STAGE_3.split()),
        "tensorboard": _MONITOR,
        "csv_monitor": _MONITOR,
        "wandb": "enabled group team project",
    }.items()
}
_LOSS_SCALING = ("loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale")
IGNORED = {"fp16": ("fp16", "type"), "bf16": ("bf16", "type", *_LOSS_SCALING)}
"""Keys that GPT-NeoX configs carry and DeepSpeed does not know. They are dropped: they never meant anything, and bf16
has no loss scaling."""


def unknown_key_problems(settings: Any) -> Iterator[str]:
    """One message for each key that DeepSpeed would refuse."""
    for section, known in KEYS.items():
        for key in getattr(settings, section) or {}:
            if key not in known and key not in IGNORED.get(section, ()):
                close = nearest(str(key), known)
                yield f"{section}.{key} is not a DeepSpeed setting" + (f"; did you mean {close}?" if close else "")
