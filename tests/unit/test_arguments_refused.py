"""Settings whose feature is not built are refused by name; whatever is off, default or built passes."""

import pytest

from megatron.neox_arguments.fields import defaults
from megatron.neox_arguments.support import HONOURED, REFUSED, refused_settings, status


def other_value(default):
    """Some value of the default's type that is neither the default nor a way to say 'off'."""
    if default is None:
        return ["something"]
    if isinstance(default, bool):
        return not default
    return default + ("x" if isinstance(default, str) else 1)


def test_defaults_and_an_empty_config_are_accepted():
    assert refused_settings({}) == []
    assert refused_settings(defaults()) == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_argument_is_named_with_its_value_and_feature(name):
    value = other_value(defaults()[name])
    problems = refused_settings({**defaults(), name: value})
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}={value!r}: {REFUSED[name]} is not built; ")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_null_is_not_a_setting(name):
    assert refused_settings({name: None}) == []


def test_every_problem_is_reported_once():
    asked = {"use_mup": True, "moe_num_experts": 8, "data_impl": "cached", "amp": {"enabled": True}}
    problems = refused_settings(asked)
    assert [problem.split("=")[0] for problem in problems] == ["use_mup", "moe_num_experts", "amp", "data_impl"]


@pytest.mark.parametrize(
    "values",
    [
        {"amp": {"enabled": False}},
        {"soft_prompt_tuning": {"enabled": False, "n_tokens": 10}},
        {"use_comet": False},
        {"sparsity_config": {}},
        {"s3_path": ""},
    ],
)
def test_switched_off_in_words_is_accepted(values):
    assert refused_settings(values) == []


def test_false_where_the_default_is_true_is_not_off():
    assert refused_settings({"deepspeed": False})
    assert refused_settings({"mamba_use_bias_in_conv": False})


@pytest.mark.parametrize(
    "values, refused",
    [
        ({"norm": "rmsnorm"}, False),
        ({"norm": "TE_LayerNorm"}, False),
        ({"data_impl": "mmap"}, False),
        ({"data_impl": "cached"}, True),
        ({"pack_impl": "packed"}, False),
        ({"pack_impl": "unpacked"}, False),
        ({"dataset_impl": "online"}, True),
        ({"train_impl": "dpo"}, True),
        ({"text_gen_type": "interactive"}, False),
        ({"text_gen_type": "precompute"}, True),
        ({"checkpoint": {"tag_validation": "Fail"}}, False),
        ({"checkpoint": {"load_universal": True}}, True),
        ({"scheduler": {"type": "WarmupLR"}}, True),
        ({"flops_profiler": {"enabled": True}, "pipe_parallel_size": 1}, True),
        ({"flops_profiler": {"enabled": False}, "pipe_parallel_size": 1}, False),
        ({"flops_profiler": {"enabled": True}}, False),
        ({"use_bias_in_norms": False}, True),
        ({"use_bias_in_norms": False, "norm": "layernorm"}, True),
        ({"use_bias_in_norms": False, "norm": "te_layernorm"}, True),
        ({"use_bias_in_norms": False, "norm": "rmsnorm"}, False),
    ],
)
def test_refusal_by_value_and_by_combination(values, refused):
    assert bool(refused_settings(values)) == refused


@pytest.mark.parametrize(
    "config, kinds",
    [
        ([[["global"], 12]], []),
        ([[["flash"], "all"]], []),
        (["global", "flash"], []),
        ([[["local", "global"], "all"]], ["local"]),
        ([[["mamba"], 2], [["rwkv", "mamba"], 2]], ["mamba", "rwkv"]),
        ([[["no such kind"], 2]], []),
    ],
)
def test_attention_kinds(config, kinds):
    problems = refused_settings({"attention_config": config})
    assert [problem.split(":")[0] for problem in problems] == [f"attention_config={kind}" for kind in kinds]


def test_wrong_types_are_left_to_the_type_check():
    refused_settings({"optimizer": "adam", "bf16": True, "checkpoint": 1, "norm": 3, "attention_config": 5})


def test_advice_names_the_setting_that_does_it():
    assert "set head_dim" in refused_settings({"head_size": 64})[0]
    assert "fp16: {loss_scale" in refused_settings({"loss_scale": 128.0})[0]


def test_long_values_are_shortened():
    problem = refused_settings({"autotuning": {str(number): number for number in range(1000)}})[0]
    assert len(problem) < 200


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_status_of_honoured_arguments(name):
    assert status(name).startswith("honoured")
