"""What is wrong with a set of arguments: a list of messages, all of them, empty when everything fits together.

Checks assume the right types (types.py has seen every value) but nothing else. The checks of the model's and of the
run's settings are in validate_model.py, validate_run.py, validate_te.py and validate_lora.py; this file has the ranges
and what concerns parallelism.
"""

from types import SimpleNamespace
from typing import Any, Iterator, List, Mapping

from megatron.neox_arguments import validate_lora, validate_model, validate_run, validate_te
from megatron.neox_arguments.deepspeed_keys import unknown_key_problems
from megatron.neox_arguments.derive import data_parallel_size, is_enabled, model_ranks, precision_section, stage_of

_MORE = (*validate_model.CHECKS, *validate_run.CHECKS, *validate_te.CHECKS, *validate_lora.CHECKS)
_POSITIVE = """
    num_layers hidden_size num_attention_heads num_kv_heads head_dim softmax_scale seq_length max_position_embeddings
    intermediate_size ffn_hidden_size expansion_factor mlp_multiple_of sliding_window_width rpe_num_buckets
    rpe_max_distance make_vocab_size_divisible_by padded_vocab_size layernorm_epsilon rms_norm_epsilon
    scalenorm_epsilon model_parallel_size global_num_gpus world_size num_gpus train_batch_size
    train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_predivide_factor train_iters train_epochs
    eval_interval log_interval steps_per_print checkpoint_factor checkpoint_num_layers keep_last_n_checkpoints
    exit_interval lr_decay_iters maximum_tokens num_samples weighted_sampler_alpha peak_theoretical_tflops
    attn_logit_softcap final_logit_softcap embedding_multiplier prefill_chunk_size
    fused_loss_chunk log_head_diagnostics rotary_denominator_scale
""".split()
_NOT_NEGATIVE = """
    pipe_parallel_size init_method_std gradient_clipping weight_decay eval_iters num_workers temperature top_k
    min_lr z_loss opt_pos_emb_offset iteration lr
""".split()
_RANGES = {
    "hidden_dropout": (lambda x: 0 <= x < 1, "from 0 up to, but not including, 1"),
    "attention_dropout": (lambda x: 0 <= x < 1, "from 0 up to, but not including, 1"),
    "rotary_pct": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "warmup": (lambda x: 0 <= x <= 1, "a fraction from 0 to 1 of the decay iterations"),
    "lr_decay_fraction": (lambda x: 0 < x <= 1, "a fraction above 0 and at most 1 of train_iters"),
    "top_p": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "seed": (lambda x: 0 <= x < 2**32, "from 0 to 4294967295"),
    "master_port": (lambda x: 0 < x < 65536, "a port number from 1 to 65535"),
}
_SET_ELSEWHERE = {
    "zero_stage": "zero_optimization.stage",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "lr": "optimizer.params.lr",
    "optimizer_type": "optimizer.type",
    "clip_grad": "gradient_clipping",
    "batch_size": "train_micro_batch_size_per_gpu",
    "is_pipe_parallel": "pipe_parallel_size",
    "dynamic_loss_scale": "fp16.loss_scale",
}


def problems_of(values: Mapping[str, Any], given: Mapping[str, Any]) -> List[str]:
    """Every problem with `values` (complete and derived); `given` are those the user wrote."""
    settings = SimpleNamespace(**values)
    problems = list(_range_problems(values))
    for check in (_parallel, _batch, _precision, _zero, _extra_args, unknown_key_problems, *_MORE):
        problems += check(settings)
    problems += _set_elsewhere(values, given)
    return list(dict.fromkeys(problems))


def _range_problems(values: Mapping[str, Any]) -> Iterator[str]:
    for name in _POSITIVE:
        if _is_number(values[name]) and values[name] <= 0:
            yield f"{name}={values[name]} must be greater than 0"
    for name in _NOT_NEGATIVE:
        if _is_number(values[name]) and values[name] < 0:
            yield f"{name}={values[name]} must not be negative"
    for name, (fits, text) in _RANGES.items():
        if values[name] is not None and not fits(values[name]):
            yield f"{name}={values[name]} must be {text}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _parallel(settings: Any) -> Iterator[str]:
    if settings.global_num_gpus % model_ranks(settings):
        yield (
            f"{settings.global_num_gpus} processes (global_num_gpus) cannot hold whole copies of a model split over "
            f"pipe_parallel_size={max(settings.pipe_parallel_size, 1)} x "
            f"model_parallel_size={settings.model_parallel_size} processes; use a multiple of {model_ranks(settings)}"
        )
    if settings.num_layers is not None and settings.pipe_parallel_size > settings.num_layers:
        yield (
            f"pipe_parallel_size={settings.pipe_parallel_size} is more than num_layers={settings.num_layers}; every "
            "pipeline stage needs a layer"
        )
    length, ranks = settings.seq_length, settings.model_parallel_size
    if settings.sequence_parallel and length is not None and ranks > 0 and length % ranks:
        yield (
            f"sequence_parallel=True splits seq_length={length} over model_parallel_size={ranks} processes, which "
            "does not divide; change seq_length or switch sequence_parallel off"
        )
    if settings.padded_vocab_size is not None and ranks > 0 and settings.padded_vocab_size % ranks:
        yield f"padded_vocab_size={settings.padded_vocab_size} does not divide by model_parallel_size={ranks}"


def _batch(settings: Any) -> Iterator[str]:
    total, micro = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
    accumulation, replicas = settings.gradient_accumulation_steps, data_parallel_size(settings)
    if total is None and micro is None:
        yield "set train_micro_batch_size_per_gpu or train_batch_size; neither is given"
    elif replicas and total != micro * accumulation * replicas:
        yield (
            f"train_batch_size={total} is not train_micro_batch_size_per_gpu={micro} x "
            f"gradient_accumulation_steps={accumulation} x {replicas} data-parallel processes = "
            f"{micro * accumulation * replicas}; leave one of the three out and it follows from the others"
        )


def _precision(settings: Any) -> Iterator[str]:
    fp16, bf16 = (is_enabled(precision_section(settings, name)) for name in ("fp16", "bf16"))
    if fp16 and bf16:
        yield "fp16 and bf16 are both enabled; keep one"
    elif fp16 and settings.precision != "fp16":
        yield f"precision={settings.precision} and fp16.enabled=True contradict each other; keep one"
    elif bf16 and settings.precision != "bfloat16":
        yield f"precision={settings.precision} and bf16.enabled=True contradict each other; keep one"
    elif settings.precision in ("fp16", "bfloat16") and not (fp16 or bf16):
        yield f"precision={settings.precision} but deepspeed_extra_args switches that precision off; remove it there"
    for name in ("fp16", "bf16", "flops_profiler"):
        section = getattr(settings, name)
        if section is not None and type(section.get("enabled")) is not bool:
            yield f"{name}={section} must hold enabled: true or enabled: false"


def _zero(settings: Any) -> Iterator[str]:
    stage = stage_of(settings.zero_optimization)
    if is_enabled(settings.autotuning):  # refused elsewhere; its configs list several stages to try
        return
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        yield f"zero_optimization.stage={stage!r} must be 0, 1, 2 or 3"
    elif stage >= 2 and settings.pipe_parallel_size >= 1:
        yield (
            f"zero_optimization.stage={stage} splits gradients, which pipeline stages accumulate, so it does not go "
            f"with pipe_parallel_size={settings.pipe_parallel_size}; use stage 0 or 1, or pipe_parallel_size 0"
        )


def _extra_args(settings: Any) -> Iterator[str]:
    extra = settings.deepspeed_extra_args or {}
    always_set = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in ("zero_optimization", "optimizer", "scheduler", "gradient_clipping", *always_set):
        if name in extra:
            yield f"deepspeed_extra_args.{name} is a setting of its own; move it to the top level of the config"
    for name in ("fp16", "bf16"):
        if name in extra and getattr(settings, name) is not None:
            yield f"{name} is set both at the top level and in deepspeed_extra_args; keep one"


def _set_elsewhere(values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Arguments that are always derived: a value of one's own would be overwritten."""
    for name, source in _SET_ELSEWHERE.items():
        if given.get(name) is not None and given[name] != values[name]:
            yield f"{name}={given[name]} would be replaced by {values[name]}, which follows from {source}; set that"
