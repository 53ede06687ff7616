"""The config for DeepSpeed, read by DeepSpeed's own parser."""

import importlib.util

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments.deepspeed_keys import KEYS
from tests.helpers.configs import tiny_args


@pytest.fixture(scope="module")
def parse():
    from deepspeed.runtime.config import DeepSpeedConfig

    return lambda **overrides: DeepSpeedConfig(tiny_args(**overrides).deepspeed_config)


def test_batch_clipping_and_zero(parse):
    config = parse(
        train_batch_size=12,
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=None,
        gradient_clipping=0.25,
        zero_optimization={"stage": 1, "reduce_bucket_size": 1234},
        steps_per_print=7,
    )
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (12, 4)
    assert (config.gradient_accumulation_steps, config.gradient_clipping, config.steps_per_print) == (3, 0.25, 7)
    assert (config.zero_optimization_stage, config.zero_config.reduce_bucket_size) == (1, 1234)
    assert config.zero_allow_untested_optimizer is True and config.zero_force_ds_cpu_optimizer is False
    assert config.optimizer_name is None and config.scheduler_name is None


@pytest.mark.parametrize("given", [dict(precision="fp16"), dict(precision=None, fp16={"enabled": True, "type": "x"})])
def test_fp16(parse, given):
    config = parse(**given)
    assert config.float16_config.enabled and not config.bfloat16_config.enabled


@pytest.mark.parametrize(
    "given",
    [
        dict(precision="bfloat16"),
        dict(precision=None, bf16={"enabled": True, "bf16": True, "loss_scale": 0}),
        dict(precision=None, deepspeed_extra_args={"bf16": {"enabled": True}}),
    ],
)
def test_bf16(parse, given):
    config = parse(**given, data_types={"grad_accum_dtype": "fp32"})
    assert config.bfloat16_config.enabled and not config.float16_config.enabled
    assert config.grad_accum_dtype == "fp32"


def test_fp32_enables_neither(parse):
    config = parse()
    assert not config.bfloat16_config.enabled and not config.float16_config.enabled


def test_one_bit_adam_is_refused_because_deepspeed_has_none():
    import deepspeed.ops

    assert not hasattr(deepspeed.ops, "onebit") and not importlib.util.find_spec("deepspeed.runtime.fp16.onebit")
    with pytest.raises(ConfigError, match="onebitadam"):
        tiny_args(optimizer={"type": "OneBitAdam", "params": {"lr": 0.01}})


def test_extra_args_come_on_top(parse):
    assert parse(deepspeed_extra_args={"wall_clock_breakdown": True}).wall_clock_breakdown is True


def test_the_dict_is_a_copy():
    args = tiny_args(zero_optimization={"stage": 1})
    args.deepspeed_config["zero_optimization"]["stage"] = 3
    assert args.zero_optimization == {"stage": 1} and args.deepspeed_config["zero_optimization"] == {"stage": 1}


def test_the_known_keys_are_deepspeeds():
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
    }
    assert set(models) == set(KEYS)
    for section, model in models.items():
        accepted = {field.alias or name for name, field in model.model_fields.items()}
        assert accepted == set(KEYS[section]), section


def test_a_refused_section_that_is_switched_off_does_not_reach_deepspeed():
    assert "amp" not in tiny_args(amp={"enabled": False}).deepspeed_config


@pytest.mark.parametrize("asking", [{"dump_state": True}, {"comms_logger": {"enabled": True, "verbose": True}}])
def test_reports_that_deepspeed_makes_at_level_info_are_shown(asking):
    assert tiny_args(**asking).deepspeed_config["log_level"] == "info"
    assert "log_level" not in tiny_args().deepspeed_config
    quiet = tiny_args(**asking, deepspeed_extra_args={"log_level": "error"})
    assert quiet.deepspeed_config["log_level"] == "error"


def test_pipeline_stages_exchange_whole_tensors_under_sequence_parallel():
    split = dict(pipe_parallel_size=2, model_parallel_size=2, global_num_gpus=4)
    config = tiny_args(**split, sequence_parallel=True).deepspeed_config
    assert config["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
    assert "pipeline" not in tiny_args(**split).deepspeed_config
