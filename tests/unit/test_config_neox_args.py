"""NeoXArgs as a whole: construction, round trips, updates, geometry, the process environment."""

import io
import json
import os
import sys

import pytest
import torch

from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry
from megatron.neox_arguments import INFERENCE_OVERRIDES, NeoXArgs, command_line
from megatron.neox_arguments.environment import Process, first_slurm_host, this_process
from megatron.neox_arguments.fields import defaults
from tests.helpers import geometries
from tests.helpers.configs import tiny_args, tiny_values

VARIED = [
    {},
    dict(train_batch_size=24, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=None, global_num_gpus=2),
    dict(precision="bfloat16", zero_optimization={"stage": 1}, pipe_parallel_size=2, gradient_clipping=0.5),
    dict(precision=None, fp16={"enabled": True}, attention_config=[[["flash", "global"], "all"]]),
    dict(optimizer={"type": "CPU_Torch_Adam", "params": {"lr": 1e-3}}, sample_input_file="prompts.txt"),
    dict(optimizer=None, deepspeed_extra_args={"bf16": {"enabled": True}}, precision=None),
    dict(train_data_paths=["a"], valid_data_paths=["b"], test_data_paths=["c"], config_files={"a.yml": "x: 1"}),
    dict(geometries.WIDE_NON_DIVISIBLE, softmax_scale=0.1, ffn_hidden_size=96, activation="SwiGLU"),
]


@pytest.mark.parametrize("overrides", VARIED, ids=str)
def test_non_default_round_trip(overrides):
    args = tiny_args(**overrides)
    again = NeoXArgs.from_dict(json.loads(json.dumps(args.non_default())))
    assert again == args
    assert again.deepspeed_config == args.deepspeed_config


@pytest.mark.parametrize("overrides", VARIED, ids=str)
def test_update_without_changes_is_equal(overrides):
    args = tiny_args(**overrides)
    assert args.update() == args and args.update() is not args


def test_every_argument_is_an_attribute():
    args = tiny_args()
    assert list(args.to_dict()) == list(defaults())


def test_configured_widths_stay_as_configured():
    args = tiny_args()
    assert (args.head_dim, args.num_kv_heads, args.softmax_scale, args.ffn_hidden_size) == (None,) * 4


@pytest.mark.parametrize("name", geometries.ALL)
def test_geometry_and_scale(name):
    keys = geometries.ALL[name]
    args = tiny_args(**keys)
    heads = keys["num_attention_heads"]
    width = keys.get("head_dim", keys["hidden_size"] // heads)
    expected = HeadGeometry(keys["hidden_size"], heads, keys.get("num_kv_heads", heads), width, width)
    assert args.head_geometry() == args.head_geometry(1) == expected
    assert args.attention_scale() == pytest.approx(width**-0.5, abs=0)
    assert tiny_args(**keys, softmax_scale=0.3).attention_scale(1) == 0.3
    assert args.mlp_geometry().ffn_hidden_size == 4 * keys["hidden_size"]
    for layer in (-1, 2):
        with pytest.raises(IndexError):
            args.head_geometry(layer)


def test_head_dim_equal_to_the_quotient_is_the_same_as_absent():
    absent, null, explicit = tiny_args(), tiny_args(head_dim=None), tiny_args(head_dim=16)
    assert absent == null
    assert absent.head_geometry() == explicit.head_geometry()
    assert absent.attention_scale() == explicit.attention_scale()


def test_rotary_width_follows_head_dim_and_position_embedding():
    wide = geometries.WIDE_NON_DIVISIBLE
    assert tiny_args(**wide, rotary_pct=0.25).head_geometry().rotary_ndims == 6
    assert tiny_args(**wide, pos_emb="learned").head_geometry().rotary_ndims == 0


@pytest.mark.parametrize(
    "precision, dtype", [("fp32", torch.float32), ("fp16", torch.float16), ("bfloat16", torch.bfloat16)]
)
def test_params_dtype(precision, dtype):
    assert tiny_args(precision=precision).params_dtype is dtype


def test_update_derives_and_validates_anew():
    args = tiny_args(train_micro_batch_size_per_gpu=4)
    assert args.update(train_micro_batch_size_per_gpu=6).train_batch_size == 6
    assert args.train_batch_size == 4
    with pytest.raises(ConfigError, match="head_dim=0"):
        args.update(head_dim=0)


def test_update_keeps_what_was_assigned_since():
    args = tiny_args()
    args.iteration, args.rank = 7, 0
    assert (args.update(seed=3).iteration, args.update(seed=3).rank) == (7, 0)
    assert args.update(iteration=9).iteration == 9


def test_dicts_are_not_shared_with_the_caller_or_a_copy():
    values = tiny_values(zero_optimization={"stage": 1})
    args = NeoXArgs.from_dict(values)
    args.optimizer["params"]["lr"] = 9.0
    args.given()["optimizer"]["params"]["lr"] = 8.0
    assert values["optimizer"]["params"]["lr"] == 1e-3 == NeoXArgs.from_dict(values).optimizer["params"]["lr"]
    args.zero_optimization["stage"] = 0
    assert args.update(seed=3).zero_stage == 0


class FakeTokenizer:
    vocab_size = 300


def test_the_tokenizer_decides_the_vocabulary(monkeypatch):
    import megatron.tokenizer

    monkeypatch.setattr(megatron.tokenizer, "build_tokenizer", lambda args: FakeTokenizer())
    args = tiny_args(padded_vocab_size=None, make_vocab_size_divisible_by=7)
    args.build_tokenizer()
    assert (args.padded_vocab_size, args.tokenizer.vocab_size) == (301, 300)
    wider = args.update(model_parallel_size=2)
    assert wider.padded_vocab_size == 308 and wider.tokenizer is args.tokenizer
    configured = tiny_args(padded_vocab_size=512)
    configured.build_tokenizer()
    assert configured.padded_vocab_size == 512
    with pytest.raises(ConfigError, match="padded_vocab_size=128"):
        tiny_args().build_tokenizer()


def test_inference_overrides_suit_any_precision_and_parallelism():
    training = dict(zero_optimization={"stage": 3}, checkpoint_activations=True, partition_activations=True)
    more = dict(contiguous_checkpointing=True, checkpoint_in_cpu=True, optimizer={"type": "lion", "params": {"lr": 1}})
    for precision in ("fp32", "fp16", "bfloat16"):
        values = tiny_values(**training, **more, precision=precision)
        args = NeoXArgs.from_dict({**values, **INFERENCE_OVERRIDES})
        assert args.optimizer is None and args.zero_stage == 0 and not args.checkpoint_activations
        assert "optimizer" not in args.deepspeed_config


def test_print_shows_what_differs_from_the_defaults():
    args, out = tiny_args(head_dim=24, config_files={"a.yml": "secret text"}), io.StringIO()
    args.print(out)
    assert "head_dim" in out.getvalue() and "24" in out.getvalue()
    assert "secret text" not in out.getvalue() and "gpt_j_residual" not in out.getvalue()
    args.rank, silent = 1, io.StringIO()
    args.print(silent)
    assert not silent.getvalue()


@pytest.mark.parametrize(
    "environ, options, expected",
    [
        ({}, {}, None),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, {}, Process(3, 1, 4)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}, {}, None),
        (
            {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "WORLD_SIZE": "1"},
            {"deepspeed_slurm": True},
            Process(3, 1, 8),
        ),
        ({"SLURM_PROCID": "2", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "3"}, {"launcher": "slurm"}, (2, 0, 6)),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"},
            {},
            Process(2, 0, 3),
        ),
    ],
)
def test_this_process(environ, options, expected):
    assert this_process(**options, environ=environ) == expected


@pytest.mark.parametrize(
    "text, host", [("gpu[07-09,12]", "gpu07"), ("gpu07,gpu08", "gpu07"), ("a-1", "a-1"), ("n[3,5]", "n3"), ("", "")]
)
def test_first_slurm_host(text, host):
    assert first_slurm_host(text) == host


def test_distributed_arguments_come_from_the_environment(monkeypatch):
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    args = tiny_args()
    args.configure_distributed_args()
    assert (args.rank, args.local_rank, args.world_size, args.train_batch_size) == (1, 1, 2, 4)
    other = tiny_args(global_num_gpus=4)
    with pytest.raises(ConfigError, match="4 processes.*2 were started"):
        other.configure_distributed_args()


def test_mpi_ranks_need_an_address(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match="master_addr"):
        tiny_args(deepspeed_mpi=True).configure_distributed_args()
    args = tiny_args(deepspeed_mpi=True, master_addr="10.0.0.3", master_port=1234)
    args.configure_distributed_args()
    assert (args.rank, args.world_size) == (1, 2)
    published = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert published == {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.3", "MASTER_PORT": "1234"}


@pytest.mark.parametrize("value", ["two", "1.5"])
def test_a_damaged_environment_is_named(monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE={value}"):
        tiny_args()


def test_a_single_process_needs_no_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    args = tiny_args()
    args.configure_distributed_args()
    assert (args.rank, args.local_rank, args.world_size) == (0, 0, 1)


def test_ranks_get_the_configured_values(monkeypatch):
    args = tiny_args(train_micro_batch_size_per_gpu=4, head_dim=24)
    flags = ["--local_rank=0", "--megatron_config", command_line.encode(args.given()), "--deepspeed_config", "e30="]
    assert NeoXArgs.consume_neox_args(input_args=flags) == args
    changed = NeoXArgs.consume_neox_args({"train_micro_batch_size_per_gpu": 2}, flags)
    assert changed.train_batch_size == 2
    with pytest.raises(ConfigError, match="load is not set"):
        NeoXArgs.consume_inference_args(input_args=flags)
    assert NeoXArgs.consume_inference_args({"load": "x"}, flags).optimizer is None


@pytest.mark.parametrize("flags", [[], ["--megatron_config", "%%%"], ["--megatron_config", command_line.encode([1])]])
def test_a_rank_without_a_usable_config_says_so(flags):
    with pytest.raises(ConfigError):
        NeoXArgs.consume_neox_args(input_args=flags)


ODD = [0, -1, 1, True, False, 1.5, -0.5, 10**30, "", "x", [], [[]], [None], ["x"], [1], [["x"], 1], {}, {"a": None}]
ODD += [{"enabled": 1}, {"enabled": True}, {"type": 1}, {"type": "adam", "params": {"lr": None}}, {"stage": "1"}]


@pytest.mark.parametrize("name", defaults())
def test_no_value_of_one_argument_ends_in_a_traceback(name):
    """Every argument with every odd value is either accepted or a ConfigError."""
    for value in ODD:
        try:
            args = NeoXArgs.from_dict({**tiny_values(), name: value})
        except ConfigError as error:
            assert name in str(error) or name in _NAMED_BY_ANOTHER, (name, value, str(error))
        else:
            assert NeoXArgs.from_dict(args.non_default()) == args


_NAMED_BY_ANOTHER = ("world_size",)
"""world_size is global_num_gpus where that is not set, and reported as such."""
