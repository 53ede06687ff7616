"""The schedule against GPT-NeoX's numbers and the formulas' fixed points."""

import math

import pytest
import torch

from megatron.errors import CheckpointError, ConfigError
from megatron.training.learning_rates import AnnealingLR, learning_rate

COSINE = dict(start_lr=1e-3, min_lr=1e-4, warmup_iter=2.0, end_iter=8, decay_style="cosine")
GPT_NEOX_LR_AFTER = [0.0005, 0.001, 0.0009397114317029975, 0.000775, 0.00055, 0.000325, 0.00016028856829700258, 0.0001]
"""Written by GPT-NeoX itself (golden case 6): the rate after each of 8 steps."""


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=123.0)


def rates(steps, **settings):
    scheduler = AnnealingLR(optimizer(), **settings)
    seen = []
    for _ in range(steps):
        scheduler.step()
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
    return seen


def test_cosine_is_gpt_neox():
    scheduler = AnnealingLR(optimizer(), **COSINE)
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.0005  # the first step's rate, set before any step
    assert rates(8, **COSINE) == pytest.approx(GPT_NEOX_LR_AFTER, rel=1e-12)


def test_first_two_steps_are_equal():
    for style in ("constant", "linear", "cosine", "exponential"):
        settings = {**COSINE, "decay_style": style}
        assert learning_rate(0, **settings) == learning_rate(1, **settings) == 0.0005


@pytest.mark.parametrize(
    "style, half, end",
    [("constant", 1e-3, 1e-3), ("linear", 5e-4, 1e-4), ("cosine", 5.5e-4, 1e-4), ("exponential", None, 1e-3 / 2)],
)
def test_decays(style, half, end):
    settings = dict(start_lr=1e-3, min_lr=1e-4, warmup_iter=10, end_iter=110, decay_style=style)
    assert learning_rate(10, **settings) == 1e-3
    if half is not None:
        assert learning_rate(60, **settings) == pytest.approx(half)
    assert learning_rate(110, **settings) == pytest.approx(end, rel=1e-3)
    after = [learning_rate(step, **settings) for step in range(110, 400)]
    assert min(after) >= 1e-4
    assert all(later <= earlier for earlier, later in zip(after, after[1:], strict=False))  # never rises again


def test_exponential_formula():
    settings = dict(start_lr=1e-3, min_lr=0.0, warmup_iter=0, end_iter=100, decay_style="exponential")
    assert learning_rate(25, **settings) == pytest.approx(1e-3 * math.exp(-0.693 / 4))


@pytest.mark.parametrize("warmup_iter", [0.0, 0.1, 0.5, 8.0])
def test_never_above_start_lr(warmup_iter):
    settings = {**COSINE, "warmup_iter": warmup_iter}
    assert max(learning_rate(step, **settings) for step in range(20)) <= 1e-3


def test_state_dict_keys_and_resume():
    first = AnnealingLR(optimizer(), **COSINE)
    for _ in range(5):
        first.step()
    state = first.state_dict()
    assert set(state) == {"start_lr", "warmup_iter", "num_iters", "decay_style", "end_iter", "min_lr"}
    second = AnnealingLR(optimizer(), **COSINE)
    second.load_state_dict(state)
    assert second.num_iters == 5
    assert second.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]


def test_other_schedule_in_checkpoint():
    state = AnnealingLR(optimizer(), **COSINE).state_dict()
    state.update(num_iters=4)
    other = {**COSINE, "start_lr": 2e-3, "end_iter": 16}
    with pytest.raises(CheckpointError, match="start_lr: 0.001 in the checkpoint, 0.002 here.*end_iter"):
        AnnealingLR(optimizer(), **other).load_state_dict(state)

    overriding = AnnealingLR(optimizer(), **other, override_lr_scheduler=True)
    overriding.load_state_dict(state)
    assert overriding.num_iters == 4
    assert overriding.get_lr() == learning_rate(4, **other)

    following = AnnealingLR(optimizer(), **other, use_checkpoint_lr_scheduler=True)
    following.load_state_dict(state)
    assert following.get_lr() == learning_rate(4, **COSINE)


def test_bad_settings():
    with pytest.raises(ConfigError, match="override_lr_scheduler"):
        AnnealingLR(optimizer(), **COSINE, override_lr_scheduler=True, use_checkpoint_lr_scheduler=True)
    with pytest.raises(ConfigError, match="lr_decay_iters=0"):
        AnnealingLR(optimizer(), **{**COSINE, "end_iter": 0})
    with pytest.raises(ConfigError, match="lr_decay_style='step'"):
        learning_rate(5, **{**COSINE, "decay_style": "step"})
