"""Every key that GPT-NeoX's configuration files hold is accepted in every form they and their readers know.

data/upstream_config_keys.json lists the keys; the configurations here are made for the test. What a form means is
written out beside it, not computed by the code under test.
"""

import json
from pathlib import Path

import pytest
import torch

from megatron.data.splits import get_train_valid_test_split_
from megatron.errors import ConfigError
from megatron.neox_arguments import INFERENCE_OVERRIDES, NeoXArgs
from tests.helpers.configs import tiny_values

KEYS = json.loads((Path(__file__).parent / "data" / "upstream_config_keys.json").read_text())["keys"]
KNOWN = [key for key, _, known in KEYS if known]
NEVER_KNOWN = [key for key, _, known in KEYS if not known]

DATA = {f"{split}_data_paths": [f"{split}_a", f"{split}_b"] for split in ("train", "valid", "test")}
ZERO = {
    "stage": 1, "allgather_partitions": True, "allgather_bucket_size": 500000000, "overlap_comm": True,
    "reduce_scatter": True, "reduce_bucket_size": 5.0e8, "contiguous_gradients": True, "cpu_offload": False,
}  # fmt: skip
FP16 = {
    "fp16": True, "enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 12,
    "hysteresis": 2, "min_loss_scale": 1,
}  # fmt: skip
ADAM = {"type": "Adam", "params": {"lr": 6.0e-4, "betas": [0.9, 0.95], "eps": 1.0e-8}}
SLURM = {"launcher": "slurm", "deepspeed_slurm": True}

FORMS = {
    "pipe_parallel_size": [0, 1, 2],
    "model_parallel_size": [1, 2],
    "num_layers": [2],
    "hidden_size": [64],
    "num_attention_heads": [4],
    "seq_length": [32],
    "max_position_embeddings": [32, 4096],
    "no_weight_tying": [True, False],
    "pos_emb": ["rotary", "Rotary", "learned", "sinusoidal", "rpe", "ALiBi", "none"],
    "scaled_upper_triang_masked_softmax_fusion": [True, False],
    "bias_gelu_fusion": [True, False],
    "output_layer_parallelism": ["column"],
    "optimizer": [ADAM, {"type": "adam", "params": {}}, {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}],
    "train_micro_batch_size_per_gpu": [1, 4],
    "data_impl": ["mmap", "MMAP", "infer"],
    "checkpoint_activations": [True, False],
    "checkpoint_num_layers": [1, 2],
    "partition_activations": [True, False],
    "synchronize_each_layer": [True, False],
    "gradient_clipping": [1.0, 1, 0],
    "weight_decay": [0.1, 0],
    "hidden_dropout": [0, 0.0, 0.1],
    "attention_dropout": [0, 0.1],
    "train_iters": [10],
    "lr_decay_iters": [10, None],
    "distributed_backend": ["nccl", "gloo"],
    "lr_decay_style": ["cosine", "Linear", "constant", "exponential"],
    "eval_interval": [1000],
    "eval_iters": [10],
    "log_interval": [100],
    "steps_per_print": [10],
    "wall_clock_breakdown": [True, False],
    "zero_optimization": [ZERO, {"stage": 0}, {"stage": 2}, {"stage": 3}, None],
    "warmup": [0.01, 0, 1],
    "norm": ["layernorm", "rmsnorm", "RMSNorm", "scalenorm", "non_parametric_layernorm"],
    "checkpoint_factor": [10000, 1000.0, None],
    "gpt_j_residual": [True, False],
    "fp16": [FP16, {"enabled": False}, {**FP16, "type": "bfloat16", "auto_cast": True}, None],
    "min_lr": [0.0, 0, 1e-5],
    "init_method": ["small_init", "normal", "scaled_normal", "wang_init", "xavier_uniform", "xavier_normal"],
    "output_layer_init_method": ["wang_init", "scaled_normal", "small_init"],
    "rotary_pct": [0.25, 1],
    "keep_last_n_checkpoints": [4, None],
    "attention_config": [
        [[["flash"], 2]], [[["global"], "all"]], [[["flash", "global"], "all"]], [[["flash"], 1], [["global"], 1]],
        ["flash", "global"], ["Global", "FLASH"], None,
    ],
    "rope_fusion": [True, False],
    "layernorm_fusion": [True, False],
    "rms_norm_epsilon": [1.0e-6],
    "activation": ["gelu", "GeLU", "swiglu", "geglu", "relu", "silu"],
    "tokenizer_type": [
        "HFTokenizer", "hftokenizer", "GPT2BPETokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer",
        "TiktokenTokenizer",
    ],
    "num_workers": [0, 1, 4],
    "make_vocab_size_divisible_by": [1, 128],
    "use_bias_in_norms": [True],
    "use_bias_in_attn_linear": [True, False],
    "gradient_accumulation_steps": [1, 4, None],
    "vocab_file": ["data/gpt2-vocab.json"],
    "extra_save_iters": [[0, 1, 2, 4, 8], [], None],
    "mlp_multiple_of": [1, 256],
    "save": ["checkpoints", None],
    "load": ["checkpoints", None],
    "split": ["995,4,1", "995/4/1", "969, 30, 1"],
    "tensorboard_dir": ["tensorboard"],
    "intermediate_size": [256],
    "log_dir": ["logs"],
    "checkpoint_validation_with_forward_pass": [False],
    "merge_file": ["data/gpt2-merges.txt"],
    "rotary_emb_base": [10000, 1000000],
    "fp32_allreduce": [True, False],
    "data_path": ["data/enwik8/enwik8_text_document"],
    "launcher": ["pdsh", "openmpi", "OpenMPI", "mvapich", "slurm"],
    "deepspeed_slurm": [True, False],
    "train_data_paths": [["a"], ["a", "b"]],
    "valid_data_paths": [["a"], ["a", "b"]],
    "test_data_paths": [["a"], ["a", "b"]],
    "mamba_selective_scan_fusion": [False],
    "mamba_causal_conv_fusion": [False],
    "mamba_inner_func_fusion": [False],
    "precision": ["fp16", "FP16", "fp32", "bfloat16", "BFloat16", None],
    "comment": ["neox"],
    "finetune": [True, False],
    "use_bias_in_mlp": [True, False],
    "num_kv_heads": [2, 4, 1, None],
    "hostfile": ["/mock_path", None],
    "autotuning": [{"enabled": False}, None],
    "bf16": [{"enabled": True}, {"bf16": True, "enabled": True, "loss_scale": 0, "hysteresis": 2}, {"enabled": False}],
    "no_ssh_check": [True, False],
    "wandb_project": ["neox"],
    "data_types": [{"grad_accum_dtype": "fp32"}, None],
    "log_grad_norm": [True, False],
    "te_columnparallel": [False, True],
    "te_rowparallel": [False, True],
    "te_layernorm_mlp": [False, True],
    "te_mha": [False, True],
    "te_fp8_format": ["hybrid"],
    "te_fp8_wgrad": [True],
    "te_fp8_amax_history_len": [1],
    "te_fp8_amax_compute_algo": ["most_recent"],
    "te_fp8_margin": [0],
    "te_fp8_mha": [False],
    "moe_num_experts": [1],
    "deepspeed_extra_args": [{"comms_logger": {"enabled": False}}, {"bf16": {"enabled": True}}, {}],
    "use_bnb_optimizer": [False],
    "global_num_gpus": [1, 4],
    "wandb_team": ["eleutherai", None],
    "wandb_group": ["run", None],
    "gmlp_attn_dim": [64],
    "override_lr_scheduler": [True, False],
    "use_comet": [False, None],
    "comet_project": [None],
    "comet_experiment_name": [None],
    "comet_tags": [[]],
    "comet_others": [{}],
    "use_wandb": [True, False, None],
    "wandb_host": ["https://api.wandb.ai"],
    "sliding_window_width": [8, None],
    "profile": [False, True],
    "profile_step_start": [10],
    "profile_step_stop": [12],
    "memory_profiling": [False],
    "memory_profiling_path": [None, ""],
    "sparsity_config": [{}, None],
    "text_gen_type": ["unconditional", "input-file", "interactive"],
    "maximum_tokens": [102],
    "prompt_end": ["\n"],
    "temperature": [1.0, 0, 0.0],
    "top_p": [0.0, 1],
    "top_k": [0, 40],
    "recompute": [True, False],
    "num_samples": [10],
    "sample_input_file": ["sample_input.txt", None],
    "sample_output_file": ["sample_output.txt"],
}  # fmt: skip

BESIDE = {
    **{key: {k: v for k, v in {**DATA, key: None}.items() if v is not None} for key in DATA},
    "comment": SLURM,
    "deepspeed_slurm": {"launcher": "slurm"},
    "save": {"checkpoint_factor": 10},
    "text_gen_type": {"sample_input_file": "prompts.txt"},
    "pipe_parallel_size": {"global_num_gpus": 2},
    "te_layernorm_mlp": {"bias_gelu_fusion": True},
    "checkpoint_validation_with_forward_pass": {"load": "checkpoints"},
}
"""What a key needs beside it to make sense."""
NOT_SET = ("precision", "fp16", "bf16", "deepspeed_extra_args")
"""With these the base configuration must not name a precision."""

UNBUILT = {
    "scheduler": {"type": "WarmupLR", "params": {}},
    "moe_num_experts": 8,
    "use_bnb_optimizer": True,
    "use_comet": True,
    "comet_project": "project",
    "comet_experiment_name": "name",
    "comet_tags": ["a"],
    "comet_others": {"a": None},
    "memory_profiling": True,
    "memory_profiling_path": "tensorboard",
    "mamba_selective_scan_fusion": True,
    "mamba_causal_conv_fusion": True,
    "mamba_inner_func_fusion": True,
    "gmlp_attn_dim": 32,
    "sparsity_config": {"block": 16, "num_local_blocks": 32},
    "autotuning": {"enabled": True, "arg_mappings": {}},
    "checkpoint_validation_with_forward_pass": True,
}
"""Keys of the list, and scheduler, with values that ask for what is not built."""


def base(key):
    values = tiny_values()
    if key in NOT_SET:
        values.pop("precision")
    return {**values, **BESIDE.get(key, {})}


def from_file(folder, values, name="a.yml", dashes=False):
    """NeoXArgs from a file with these values; JSON text is YAML too."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({key.replace("_", "-") if dashes else key: value for key, value in values.items()}))
    return NeoXArgs.from_ymls([str(path)])


def test_every_key_has_forms_here():
    assert set(FORMS) == set(KNOWN)


@pytest.mark.parametrize("key", KNOWN)
def test_every_form_is_accepted_in_either_spelling_and_file_format(key, tmp_path):
    for value in FORMS[key]:
        values = {**base(key), key: value}
        args = NeoXArgs.from_dict(values)
        for number, (name, dashes) in enumerate([("a.yml", False), ("b.yml", True), ("c.json", True)]):
            read = from_file(tmp_path / str(number), values, name, dashes)
            assert {**read.to_dict(), "config_files": None} == {**args.to_dict(), "config_files": None}, value
        same = args.given()[key]
        assert same == value or (isinstance(value, (str, list)) and str(same).lower() == str(value).lower())


@pytest.mark.parametrize("key", KNOWN)
def test_null_is_as_if_not_written(key):
    values = base(key)
    if key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"):
        with pytest.raises(ConfigError, match=f"{key} is not set"):
            NeoXArgs.from_dict({**values, key: None})
        return
    values.pop(key, None)
    if key == "train_micro_batch_size_per_gpu":
        values["train_batch_size"] = 2
    if key in DATA:  # all three or none
        values = {name: value for name, value in values.items() if name not in DATA}
    absent, null = NeoXArgs.from_dict(values), NeoXArgs.from_dict({**values, key: None})
    assert null.to_dict() == absent.to_dict()


@pytest.mark.parametrize("key", NEVER_KNOWN)
def test_keys_that_gpt_neox_never_knew_are_refused_with_the_right_name(key):
    meant = {
        "attention_type": "attention_config",
        "autotuning_config": "autotuning",
        "decay_lr_to": "min_lr",
        "save_interval": "checkpoint_factor",
        "warmup_iters": "warmup",
    }
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict({**tiny_values(), key: 1, "autotuning": {"enabled": True}})
    assert caught.value.problems[0] == f"{key} is not a known setting; did you mean {meant[key]}?"
    assert [problem.split("=")[0] for problem in caught.value.problems[1:]] == ["autotuning"]


def test_one_error_names_every_key_of_an_unbuilt_feature(tmp_path):
    attention = {"attention_config": [[["local", "global"], "all"]]}
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, {**tiny_values(), **UNBUILT, **attention}, dashes=True)
    problems = caught.value.problems
    named = sorted(problem.split("=")[0] for problem in problems)
    assert named == sorted([*UNBUILT, *attention])
    assert all("not built" in problem for problem in problems)
    assert any(problem.startswith("attention_config=local:") for problem in problems)
    assert all(problem in str(caught.value) for problem in problems)


def test_a_mamba_config_is_refused_for_mamba_only():
    """GPT-NeoX's have a number of heads that does not divide the width, and no heads."""
    values = {**tiny_values(hidden_size=64, num_attention_heads=12), "attention_config": [[["mamba"], "all"]]}
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict(values)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["attention_config=mamba"]


def test_an_autotuning_config_is_refused_for_autotuning_only():
    values = tiny_values(autotuning={"enabled": True}, zero_optimization={"stage": [0, 1, 2, 3]})
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict(values)
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["autotuning"]


@pytest.mark.parametrize(
    "config, kinds",
    [
        (None, "aaaa"),
        ([[["flash"], 4]], "ffff"),
        ([[["global"], "all"]], "gggg"),
        ([[["flash", "global"], "all"]], "fgfg"),
        ([[["flash"], 1], [["global", "flash"], 1], [["global"], 1]], "fgfg"),
        (["Flash", "global", "GLOBAL", "flash"], "fggf"),
    ],
)
def test_attention_config(config, kinds):
    args = NeoXArgs.from_dict(tiny_values(num_layers=4, attention_config=config))
    assert args.attention_config == [{"f": "flash", "g": "global", "a": "auto"}[kind] for kind in kinds]


@pytest.mark.parametrize(
    "written, precision, dtype",
    [
        ({"fp16": FP16}, "fp16", torch.float16),
        ({"fp16": {**FP16, "type": "bfloat16", "auto_cast": True}}, "fp16", torch.float16),
        ({"fp16": {"enabled": False}}, "fp32", torch.float32),
        ({"precision": "FP16"}, "fp16", torch.float16),
        ({"precision": "fp16", "fp16": {"loss_scale": 0}}, "fp16", torch.float16),
        ({"precision": "fp16", "fp16": {"enabled": False}}, "fp16", torch.float16),
        ({"bf16": {"enabled": True}}, "bfloat16", torch.bfloat16),
        ({"bf16": {"enabled": True, "loss_scale": 0}, "fp16": {"enabled": False}}, "bfloat16", torch.bfloat16),
        ({"precision": "BFLOAT16"}, "bfloat16", torch.bfloat16),
        ({"deepspeed_extra_args": {"bf16": {"enabled": True}}}, "bfloat16", torch.bfloat16),
        ({"precision": "Fp32", "fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32", torch.float32),
        ({}, "fp32", torch.float32),
    ],
)
@pytest.mark.parametrize("zero", [None, {"stage": 1}])
def test_precision(written, precision, dtype, zero):
    """bf16 without ZeRO stops GPT-NeoX with a TypeError; here it is an ordinary configuration."""
    from deepspeed.runtime.config import DeepSpeedConfig

    values = {**base("precision"), **written, "zero_optimization": zero}
    args = NeoXArgs.from_dict(values)
    assert (args.precision, args.params_dtype, args.zero_stage) == (precision, dtype, 1 if zero else 0)
    parsed = DeepSpeedConfig(args.deepspeed_config)
    assert (parsed.float16_config.enabled, parsed.bfloat16_config.enabled) == (
        precision == "fp16",
        precision == "bfloat16",
    )
    if precision == "fp16":
        assert parsed.float16_config.loss_scale == 0  # dynamic
        assert parsed.float16_config.auto_cast is args.fp16.get("auto_cast", False)
    generating = NeoXArgs.from_dict({**values, **INFERENCE_OVERRIDES})
    assert (generating.params_dtype, generating.zero_stage) == (dtype, 0)


@pytest.mark.parametrize("zero", [form for form in FORMS["zero_optimization"] if form])
def test_deepspeed_reads_the_zero_section(zero):
    from deepspeed.runtime.config import DeepSpeedConfig

    parsed = DeepSpeedConfig(NeoXArgs.from_dict(tiny_values(zero_optimization=zero)).deepspeed_config)
    assert parsed.zero_optimization_stage == zero["stage"]
    assert parsed.zero_config.reduce_bucket_size == zero.get("reduce_bucket_size", 5e8)
    assert parsed.zero_config.offload_optimizer is None


@pytest.mark.parametrize("kind", ["adam", "cpu_adam", "cpu_torch_adam", "sm3", "madgrad_wd", "sgd", "lion"])
def test_optimizer_types_in_any_letter_case(kind):
    for spelling in (kind, kind.upper(), kind.title()):
        args = NeoXArgs.from_dict(tiny_values(optimizer={"type": spelling, "params": {"lr": 2}}))
        assert (args.optimizer_type, args.lr) == (kind, 2.0) and type(args.lr) is float


@pytest.mark.parametrize(
    "split, ends",
    [
        ("995,4,1", [0, 1990, 1998, 2000]),
        ("995/4/1", [0, 1990, 1998, 2000]),
        ("969, 30, 1", [0, 1938, 1998, 2000]),
        ("0.5,0.25,0.25", [0, 1000, 1500, 2000]),
        ("9,1", [0, 1800, 2000, 2000]),
        ("7", [0, 2000, 2000, 2000]),
    ],
)
def test_split(split, ends):
    args = NeoXArgs.from_dict(tiny_values(split=split))
    assert get_train_valid_test_split_(args.split, 2000) == ends


@pytest.mark.parametrize(
    "written, expected",
    [
        (dict(train_batch_size=12, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=None), (12, 3, 2)),
        (dict(train_batch_size=12, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=2), (12, 3, 2)),
        (dict(train_batch_size=None, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2), (12, 3, 2)),
        (dict(train_batch_size=12, train_micro_batch_size_per_gpu=None), (12, 6, 1)),
        (dict(train_batch_size=12, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None), (12, 6, 1)),
        (dict(train_micro_batch_size_per_gpu=3), (6, 3, 1)),
        (dict(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=None), (6, 3, 1)),
    ],
)
def test_batch_sizes_on_two_replicas(written, expected):
    args = NeoXArgs.from_dict(tiny_values(global_num_gpus=2, **written))
    got = (args.train_batch_size, args.train_micro_batch_size_per_gpu, args.gradient_accumulation_steps)
    assert got == expected and args.batch_size == expected[1]


def test_accumulation_left_out_follows_where_gpt_neox_wants_null():
    values = tiny_values(train_batch_size=12, train_micro_batch_size_per_gpu=4)
    assert "gradient_accumulation_steps" not in values
    assert NeoXArgs.from_dict(values).gradient_accumulation_steps == 3
    with pytest.raises(ConfigError, match="train_batch_size=12"):
        NeoXArgs.from_dict({**values, "gradient_accumulation_steps": 1})


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [2, 1], [0.5, 0]])
def test_data_sets_and_their_weights(weights):
    given = {f"{split}_data_weights": weights for split in ("train", "valid", "test")}
    args = NeoXArgs.from_dict(tiny_values(**DATA, **given))
    for split in ("train", "valid", "test"):
        assert getattr(args, f"{split}_data_paths") == DATA[f"{split}_data_paths"]
        assert getattr(args, f"{split}_data_weights") == (weights or [1.0, 1.0])


@pytest.mark.parametrize(
    "settings",
    [
        dict(checkpoint_factor=10),
        dict(checkpoint_factor=None, extra_save_iters=[0, 5]),
        dict(checkpoint_factor=10, extra_save_iters=[]),
        dict(checkpoint_factor=1.5, checkpoint_scale="log"),
        dict(checkpoint_factor=10, checkpoint_scale="Linear"),
    ],
)
def test_ways_to_say_when_to_save(settings):
    assert NeoXArgs.from_dict(tiny_values(save="checkpoints", **settings)).save == "checkpoints"


def test_the_rest_of_the_files_forms(tmp_path):
    """Labels, logging, cluster and sampling keys together, as an overlay for any model has them."""
    model = {key: value for key, value in tiny_values().items() if key != "distributed_backend"}
    overlay = {
        **dict(git_hash="7c0a2f1", use_wandb=False, wandb_group="g", wandb_team=None, wandb_project="neox"),
        **dict(wandb_host="https://api.wandb.ai", wandb_init_all_ranks=False, hostfile="/mock_path", num_nodes=-1),
        **dict(include="localhost:0,1", launcher="openMPI", distributed_backend="nccl", deepspeed_mpi=True),
        **dict(vocab_file="v.json", merge_file="m.txt", data_path="d", save="c", load="c", checkpoint_factor=5),
    }
    paths = []
    for name, values in (("model.yml", model), ("local_setup.json", overlay)):
        (tmp_path / name).write_text(json.dumps(values))
        paths.append(str(tmp_path / name))
    args = NeoXArgs.from_ymls(paths)
    assert (args.launcher, args.include, args.git_hash) == ("openmpi", "localhost:0,1", "7c0a2f1")
    assert set(args.config_files) == {"model.yml", "local_setup.json"}
    assert args.to_dict() == NeoXArgs.from_ymls(paths[::-1]).to_dict()
