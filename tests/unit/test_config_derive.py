"""Derived arguments, against GPT-NeoX's rules written out here."""

import copy
import itertools

import pytest

from megatron.neox_arguments.derive import derive, expand_attention_config
from megatron.neox_arguments.fields import defaults


def derived(world_size=None, **values):
    return derive({**defaults(), **values}, world_size)


@pytest.mark.parametrize("replicas, micro, steps", list(itertools.product((1, 3), (1, 4), (1, 5))))
@pytest.mark.parametrize("model_ranks", [(0, 1), (1, 2), (2, 3)])
def test_any_one_missing_batch_number_follows(replicas, micro, steps, model_ranks):
    pipe, tensor = model_ranks
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    full = dict(zip(names, (micro * steps * replicas, micro, steps), strict=True))
    layout = dict(pipe_parallel_size=pipe, model_parallel_size=tensor, global_num_gpus=replicas * max(pipe, 1) * tensor)
    for missing in names:
        got = derived(**layout, **{**full, missing: None})
        assert {name: got[name] for name in names} == full, missing
        assert got["batch_size"] == micro


@pytest.mark.parametrize("given, expected", [(dict(train_batch_size=12), (12, 4, 1)), (dict(), (None, None, None))])
def test_batch_from_the_total_alone(given, expected):
    got = derived(global_num_gpus=3, **{**given, "gradient_accumulation_steps": None})
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert tuple(got[name] for name in names) == expected


def test_batch_from_the_micro_batch_alone():
    got = derived(global_num_gpus=3, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=None)
    assert (got["train_batch_size"], got["gradient_accumulation_steps"]) == (12, 1)


@pytest.mark.parametrize(
    "values, precision",
    [
        ({}, "fp32"),
        ({"precision": "bfloat16"}, "bfloat16"),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "fp16"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "fp16"),  # pythia/1B.yml: "type" is not looked at
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"bf16": {"enabled": True}}, "bfloat16"),
        ({"deepspeed_extra_args": {"bf16": {"enabled": True}}}, "bfloat16"),
    ],
)
def test_precision(values, precision):
    assert derived(**values)["precision"] == precision


def test_a_precision_by_name_switches_deepspeeds_section_on():
    assert derived(precision="bfloat16")["bf16"] == {"enabled": True}
    assert derived(precision="fp16", fp16={"loss_scale": 8})["fp16"] == {"loss_scale": 8, "enabled": True}
    assert "fp16" not in derived(precision="fp32")
    assert "bf16" not in derived(precision="bfloat16", deepspeed_extra_args={"bf16": {"enabled": True}})


def test_zero_is_never_none_and_its_numbers_are_copied_out():
    got = derived()
    assert got["zero_optimization"]["stage"] == 0 == got["zero_stage"]
    got = derived(zero_optimization={"stage": 2, "reduce_bucket_size": 5.0e7, "contiguous_gradients": True})
    assert (got["zero_stage"], got["zero_reduce_bucket_size"], got["zero_contiguous_gradients"]) == (
        2,
        50_000_000,
        True,
    )
    assert got["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 5.0e7, "contiguous_gradients": True}


@pytest.mark.parametrize(
    "optimizer, lr, kind",
    [
        ({"type": "Adam", "params": {"lr": 6e-4}}, 6e-4, "adam"),
        ({"type": "SGD", "params": {}}, 0.001, "sgd"),
        ({"type": "Lion", "params": {"lr": 1}}, 1.0, "lion"),
    ],
)
def test_optimizer(optimizer, lr, kind):
    got = derived(optimizer=optimizer)
    assert (got["lr"], got["optimizer_type"]) == (lr, kind) and type(got["lr"]) is float


def test_no_optimizer_leaves_a_learning_rate():
    assert derived()["lr"] == 0.001
    assert derived(lr=0.5)["lr"] == 0.5


@pytest.mark.parametrize(
    "config, kinds",
    [
        (None, ["auto"] * 4),
        ([[["flash"], 4]], ["flash"] * 4),
        ([[["flash", "global"], 2]], ["flash", "global"] * 2),
        ([[["global", "flash"], "all"]], ["global", "flash", "global", "flash"]),
        ([[["flash"], 1], [["global"], 3]], ["flash", "global", "global", "global"]),
        (["Flash", "global", "flash", "GLOBAL"], ["flash", "global", "flash", "global"]),
    ],
)
def test_attention_config(config, kinds):
    assert expand_attention_config(config, 4) == kinds
    assert expand_attention_config(kinds, 4) == kinds


def test_processes_come_from_the_most_direct_source():
    assert derived(pipe_parallel_size=2, model_parallel_size=3)["global_num_gpus"] == 6
    assert derived(num_gpus=4, model_parallel_size=2)["global_num_gpus"] == 4
    assert derived(world_size=8, num_gpus=4)["global_num_gpus"] == 8
    assert derived(world_size=8, global_num_gpus=2)["global_num_gpus"] == 2
    assert derived(num_gpus=4, hostfile="/hosts")["global_num_gpus"] == 1


def test_the_rest():
    assert derived(pipe_parallel_size=1)["is_pipe_parallel"] is True
    assert derived(pipe_parallel_size=0)["is_pipe_parallel"] is False
    assert derived(gradient_clipping=0.5)["clip_grad"] == 0.5
    assert derived()["text_gen_type"] == "unconditional"
    assert derived(sample_input_file="x")["text_gen_type"] == "input-file"
    assert derived(train_data_paths=["a", "b"])["train_data_weights"] == [1.0, 1.0]
    assert "train_data_weights" not in derived(train_data_paths=["a", "b"], train_data_weights=[2, 1])


def test_derive_is_pure_and_idempotent():
    values = {
        **defaults(),
        **dict(num_layers=4, train_batch_size=24, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=None),
        **dict(optimizer={"type": "Adam", "params": {"lr": 1}}, attention_config=[[["flash"], "all"]]),
        **dict(precision="fp16", global_num_gpus=3, zero_optimization={"stage": 1}),
    }
    before = copy.deepcopy(values)
    first = derive(values)
    assert values == before
    assert derive({**values, **first}) == {key: value for key, value in first.items() if key != "fp16"}
