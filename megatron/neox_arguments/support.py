"""What is done with each argument: every one is in exactly one of HONOURED, NO_EFFECT_ON_RESULTS, REFUSED, DERIVED.

An argument whose feature is not built is refused by name when it is set, so that nothing is silently ignored. When a
feature is built, its names move from REFUSED to HONOURED here, and the rendered reference follows.
"""

from typing import Any, Dict, Iterable, List, Mapping, Tuple

from megatron.neox_arguments.fields import defaults

BUILT_ATTENTION_KINDS = ("global", "flash", "chunked", "auto")
ATTENTION_KINDS = (
    *BUILT_ATTENTION_KINDS,
    *("local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer", "gmlp", "amlp", "rwkv", "mamba"),
)

HONOURED = frozenset(
    # Launcher.
    """
    hostfile include exclude num_nodes num_gpus master_port master_addr launcher force_multi no_ssh_check comment
    account deepspeed_mpi deepspeed_slurm distributed_backend
    """.split()
    # Passed to DeepSpeed.
    + """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer fp32_allreduce
    prescale_gradients gradient_predivide_factor fp16 bf16 gradient_clipping zero_optimization steps_per_print
    wall_clock_breakdown dump_state flops_profiler tensorboard wandb csv_monitor comms_logger checkpoint data_types
    deepspeed_extra_args
    """.split()
    # Model.
    + """
    precision num_layers hidden_size intermediate_size ffn_hidden_size mlp_multiple_of expansion_factor
    num_attention_heads num_kv_heads head_dim softmax_scale seq_length sliding_window_width max_position_embeddings
    norm use_qk_layernorm layernorm_epsilon rms_norm_epsilon scalenorm_epsilon pos_emb rpe_num_buckets
    rpe_max_distance opt_pos_emb_offset no_weight_tying attention_config make_vocab_size_divisible_by activation
    bias_gelu_fusion fp16_lm_cross_entropy init_method_std apply_query_key_layer_scaling use_cpu_initialization
    attention_softmax_in_fp32 rotary_pct rotary_emb_base rotary_save_freqs_buffer init_method
    output_layer_init_method gpt_j_residual gpt_j_tied use_bias_in_attn_linear use_bias_in_mlp
    output_layer_parallelism attention_dropout hidden_dropout
    qk_norm_type layer_types no_rope_layers rope_scaling rotary_denominator_scale attn_logit_softcap
    final_logit_softcap zero_centered_gamma lora fused_loss_chunk norm_placement embedding_multiplier add_qkv_bias
    use_bias_in_output_layer te_mha te_columnparallel te_rowparallel te_layernorm_mlp te_fp8_format te_fp8_wgrad
    te_fp8_amax_history_len te_fp8_amax_compute_algo te_fp8_margin te_fp8_mha v_norm shared_key_value layer_scalar
    """.split()
    # Parallelism and activation checkpointing.
    + """
    pipe_parallel_size model_parallel_size pipe_partition_method sequence_parallel checkpoint_activations
    checkpoint_num_layers contiguous_checkpointing checkpoint_in_cpu synchronize_each_layer profile_backward
    partition_activations
    """.split()
    # Learning rate, tokenizer, data.
    + """
    lr_decay_style lr_decay_iters lr_decay_fraction min_lr warmup override_lr_scheduler use_checkpoint_lr_scheduler
    weight_decay tokenizer_type eod_token vocab_file merge_file data_path use_shared_fs train_data_paths
    train_label_data_paths test_data_paths test_label_data_paths valid_data_paths valid_label_data_paths
    train_data_weights valid_data_weights test_data_weights weight_by_num_documents weighted_sampler_alpha data_impl
    pack_impl allow_chopped mmap_warmup split num_workers eod_mask_loss
    """.split()
    # Training loop, checkpoints.
    + """
    save load checkpoint_scale checkpoint_factor extra_save_iters no_save_optim no_save_rng no_load_optim no_load_rng
    finetune iteration train_iters train_epochs eval_iters eval_interval keep_last_n_checkpoints exit_interval
    char_level_ppl seed compile
    """.split()
    # Logging.
    + """
    use_wandb wandb_group wandb_run_name wandb_team wandb_project wandb_host wandb_init_all_ranks log_dir
    tensorboard_dir peak_theoretical_tflops log_interval log_grad_pct_zeros log_param_norm log_grad_norm
    log_optimizer_states log_head_diagnostics profile profile_step_start profile_step_stop
    """.split()
    # Generation.
    + """
    text_gen_type temperature top_p top_k return_logits maximum_tokens prompt_end sample_input_file
    sample_output_file num_samples recompute kv_cache_dtype prefill_chunk_size
    """.split()
    # Evaluation.
    + """
    eval_results_prefix eval_tasks eval_task_folder eval_num_fewshot eval_limit eval_batch_size perplexity_file
    perplexity_stride
    """.split()
)

TE_LAYERS = ("te_mha", "te_fp8_mha", "te_layernorm_mlp", "te_columnparallel", "te_rowparallel")
"""The switches that make parts of a layer Transformer Engine's."""

DERIVED = frozenset(
    """
    world_size is_pipe_parallel config_files optimizer_type lr zero_stage zero_reduce_scatter
    zero_contiguous_gradients zero_reduce_bucket_size zero_allgather_bucket_size padded_vocab_size batch_size
    clip_grad dynamic_loss_scale local_rank rank user_script do_train do_valid do_test global_num_gpus
    """.split()
)

_SAME_FUNCTION = "the fused kernel computes the same function up to rounding; no separate kernel is used here"

NO_EFFECT_ON_RESULTS: Dict[str, str] = {
    "layernorm_fusion": "torch's layernorm, which is always used, is one kernel already",
    "rmsnorm_fusion": "torch's one-pass kernel computes the same function up to rounding",
    "use_flashattn_swiglu": _SAME_FUNCTION,
    "scaled_upper_triang_masked_softmax_fusion": _SAME_FUNCTION,
    "scaled_masked_softmax_fusion": _SAME_FUNCTION,
    "bias_dropout_fusion": _SAME_FUNCTION,
    "rope_fusion": _SAME_FUNCTION,
    "fused_kernels_build_path": "no kernel of ours is compiled, so nothing is placed there",
    "use_bias_in_norms": "rmsnorm, scalenorm and non_parametric_layernorm have no bias to switch off",
    "short_seq_prob": "only BERT-style data sets used it; the packed GPT data set has one sequence length",
    "git_hash": "a label kept with the configuration",
}

_MUP = "muP (maximal update parametrisation)"
_MOE = "mixture of experts"
_MAMBA = "the mamba layer"
_RWKV = "the rwkv layer"
_PREFERENCE = "preference training (dpo, kto, reward model, reinforce)"
_ONLINE = "training on online data with a weight server"
_COMET = "logging to Comet"
_NOISE = "the gradient noise scale"
_LOSS_SCALE = "loss scaling set outside the fp16 block"
_REMOVED = "a feature that DeepSpeed 0.19 has removed"

_REFUSED_BY_FEATURE: Dict[str, str] = {
    _MUP: "use_mup coord_check save_base_shapes base_shapes_file mup_init_scale mup_attn_temp mup_output_temp "
    "mup_embedding_mult mup_rp_embedding_mult mup_width_scale",
    _MOE: "moe_num_experts moe_expert_interval moe_top_k moe_router_type moe_lbl_in_fp32 moe_jitter_eps",
    _MAMBA: "mamba_selective_scan_fusion mamba_causal_conv_fusion mamba_inner_func_fusion mamba_selective_fp32_params "
    "mamba_use_bias_in_conv mamba_use_bias_in_linears",
    _RWKV: "dim_att head_size ffn_dim",
    "the gmlp layer": "gmlp_attn_dim",
    "a learning-rate scheduler of DeepSpeed's": "scheduler",
    _PREFERENCE: "train_impl dpo_fp32 dpo_reference_free dpo_beta kto_fp32 kto_desirable_weight kto_undesirable_weight "
    "z_loss kto_beta fp32_reinforce kl_impl kl_div_beta reinforce_leave_one_out train_reward_data_paths "
    "test_reward_data_paths valid_reward_data_paths precompute_model_name",
    "pairwise or online data": "dataset_impl pos_train_data_paths neg_train_data_paths pos_train_label_data_paths "
    "neg_train_label_data_paths pos_valid_data_paths neg_valid_data_paths pos_valid_label_data_paths "
    "neg_valid_label_data_paths pos_test_data_paths neg_test_data_paths pos_test_label_data_paths "
    "neg_test_label_data_paths",
    _ONLINE: "serve_model_weights weight_server_port online_dataserver_ips online_dataserver_ports",
    "soft prompt tuning": "soft_prompt_tuning",
    "block-sparse attention": "sparsity_config",
    "sharing parameters between layers": "num_unique_layers param_sharing_style",
    _REMOVED: "sparse_gradients amp curriculum_learning curriculum_seqlen sparse_attention elasticity "
    "compression_training",
    "autotuning": "autotuning autotuning_run",
    "DeepSpeed's own data sampling": "data_efficiency",
    "DeepSpeed's activation_checkpointing block": "activation_checkpointing",
    "a true/false communication_data_type": "communication_data_type",
    "running without DeepSpeed": "deepspeed",
    "activation checkpointing without DeepSpeed": "deepspeed_activation_checkpointing",
    "the 8-bit optimizer of bitsandbytes": "use_bnb_optimizer",
    _LOSS_SCALE: "hysteresis loss_scale loss_scale_window min_scale",
    "upload of checkpoints to S3": "s3_path s3_chunk_size",
    "the forward pass that checks a checkpoint": "checkpoint_validation_with_forward_pass",
    _COMET: "use_comet comet_workspace comet_project comet_experiment_name comet_tags comet_others comet_experiment",
    _NOISE: "log_gradient_noise_scale gradient_noise_scale_n_batches gradient_noise_scale_cpu_offload",
    "the memory snapshot": "memory_profiling memory_profiling_path",
    "building the model before its process groups": "lazy_mpu_init",
    "the ADLR cluster's automatic resume": "adlr_autoresume adlr_autoresume_interval",
    "a model form for ONNX export": "onnx_safe",
    "DeepScale": "deepscale deepscale_config",
}

REFUSED: Dict[str, str] = {name: feature for feature, names in _REFUSED_BY_FEATURE.items() for name in names.split()}
"""Argument -> the feature it belongs to, which is not built. Only the default is accepted."""

_INSTEAD: Dict[str, str] = {
    "scheduler": "the learning rate follows lr_decay_style, warmup and min_lr",
    "head_size": "for the width of one attention head set head_dim",
    "ffn_dim": "for the width of one MLP branch set ffn_hidden_size",
    "communication_data_type": "write deepspeed_extra_args: {communication_data_type: fp32}",
    "activation_checkpointing": "use partition_activations, contiguous_checkpointing, checkpoint_in_cpu, "
    "synchronize_each_layer and profile_backward",
    "amp": "use precision: fp16 or bfloat16",
    "hysteresis": "write fp16: {hysteresis: ...}",
    "loss_scale": "write fp16: {loss_scale: ...}",
    "loss_scale_window": "write fp16: {loss_scale_window: ...}",
    "min_scale": "write fp16: {min_loss_scale: ...}",
}

_REFUSED_CHOICES: Dict[str, Dict[str, str]] = {
    "data_impl": {"cached": "the old 'cached' data format"},
    "text_gen_type": {"precompute": "writing log-probabilities of data sets"},
}
"""For honoured arguments: the choices that are not built, and the feature each needs."""

_CHECKPOINT_KEYS = ("tag_validation",)


def refused_settings(values: Mapping[str, Any]) -> List[str]:
    """One message for each setting that asks for something not built; empty if everything can be done.

    `values` maps argument names to values, raw or derived; arguments left out count as not set.
    """
    standard = defaults()
    problems = [
        _message(name, values[name], feature)
        for name, feature in REFUSED.items()
        if name in values and not _is_off(values[name], standard[name])
    ]
    for name, choices in _REFUSED_CHOICES.items():
        choice = str(values.get(name)).lower()
        if choice in choices:
            problems.append(_message(name, values[name], choices[choice]))
    return problems + _attention_problems(values) + _combination_problems(values)


def status(name: str) -> str:
    """How the rendered reference describes an argument's treatment."""
    if name in NO_EFFECT_ON_RESULTS:
        return f"accepted without effect on results: {NO_EFFECT_ON_RESULTS[name]}"
    if name in REFUSED:
        return f"refused unless default: {REFUSED[name]} is not built"
    if name in DERIVED:
        return "set by the framework"
    refused = _REFUSED_CHOICES.get(name)
    return "honoured" + (f"; not built: {', '.join(refused)}" if refused else "")


def _message(name: str, value: Any, feature: str) -> str:
    return f"{name}={_short(value)}: {feature} is not built; {_INSTEAD.get(name, 'remove it')}"


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _is_off(value: Any, default: Any) -> bool:
    """The default, null, or an explicit 'not wanted' such as false, [] or {enabled: false}."""
    if value is None or value == default:
        return True
    if isinstance(value, dict) and value.get("enabled") is False:
        return True
    return not default and (value is False or value in ([], {}, ""))


def _attention_problems(values: Mapping[str, Any]) -> List[str]:
    kinds = dict.fromkeys(_strings(values.get("attention_config") or []))
    return [
        f"attention_config={kind}: this kind of attention is not built; use one of {', '.join(BUILT_ATTENTION_KINDS)}"
        for kind in kinds
        if kind in ATTENTION_KINDS and kind not in BUILT_ATTENTION_KINDS
    ]


def _strings(nested: Any) -> Iterable[str]:
    """Every string in a list of lists, e.g. [[["global", "local"], 12]]."""
    if isinstance(nested, str):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for item in nested:
            yield from _strings(item)


def _combination_problems(values: Mapping[str, Any]) -> List[str]:
    """Settings that are harmless alone and would be ignored together with another one."""
    return [problem for applies, problem in _combinations(values) if applies]


def _combinations(values: Mapping[str, Any]) -> List[Tuple[bool, str]]:
    norm = str(values.get("norm") or "layernorm").lower()
    other_keys = sorted(set(_block(values, "checkpoint")) - set(_CHECKPOINT_KEYS))
    return [
        (
            values.get("use_bias_in_norms") is False and norm in ("layernorm", "te_layernorm"),
            "use_bias_in_norms=False: layernorm always has its bias, as in GPT-NeoX; remove it",
        ),
        (
            _block(values, "flops_profiler").get("enabled") is True
            and values.get("pipe_parallel_size") not in (None, 0),
            "flops_profiler.enabled=True: DeepSpeed's pipeline engine never reports its profile; set "
            "pipe_parallel_size: 0 or remove it",
        ),
        (
            bool(other_keys),
            f"checkpoint={_short(values.get('checkpoint'))}: only {', '.join(_CHECKPOINT_KEYS)} can be set; "
            f"remove {', '.join(other_keys)}",
        ),
    ]


def _block(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A dict argument; empty where it is unset or of a wrong type, which the type check reports."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}
