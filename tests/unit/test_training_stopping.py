"""When a run saves and when it stops."""

import math
import os
import signal
from types import SimpleNamespace

import pytest

from megatron.errors import NeoXError
from megatron.training.saving import is_save_iter
from megatron.training.stopping import MAX_BAD_LOSSES, MAX_SKIPPED_STEPS, SIGNALS, Health, StopSignal


def saves(until=40, **settings):
    defaults = dict(extra_save_iters=None, checkpoint_factor=None, checkpoint_scale="linear")
    args = SimpleNamespace(**{**defaults, **settings})
    return [iteration for iteration in range(until + 1) if is_save_iter(args, iteration)]


def test_save_iterations():
    assert saves(checkpoint_factor=10) == [10, 20, 30, 40]
    assert saves(checkpoint_factor=10.0, extra_save_iters=[0, 3, 20]) == [0, 3, 10, 20, 30, 40]
    assert saves(checkpoint_factor=2, checkpoint_scale="log") == [1, 2, 4, 8, 16, 32]
    assert saves(checkpoint_factor=1.5, checkpoint_scale="log") == [1, 2, 3, 5, 7, 11, 17, 25, 38]
    assert saves(extra_save_iters=[7]) == [7]
    assert saves() == []


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_noted_and_handlers_come_back(number):
    before = [signal.getsignal(other) for other in SIGNALS]
    with StopSignal() as stop:
        assert stop.agreed() is None
        os.kill(os.getpid(), number)
        assert stop.agreed() == number.name == stop.agreed()
    assert [signal.getsignal(other) for other in SIGNALS] == before


def test_second_signal_acts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        assert stop.agreed() == "SIGINT"
    signal.signal(signal.SIGINT, before)


def step(loss=1.0, skipped=False):
    return {"loss": loss, "skipped": skipped}


def test_bad_losses_stop_a_run():
    health = Health(dynamic_loss_scale=False)
    assert health.check(1, step()) is None and health.is_good
    for iteration in range(2, 1 + MAX_BAD_LOSSES):
        assert "the loss is nan" in health.check(iteration, step(math.nan))
        assert not health.is_good
    assert health.check(8, step()) is None and health.is_good  # one good step, and the count starts again
    for iteration in range(MAX_BAD_LOSSES - 1):
        health.check(iteration, step(math.inf))
    with pytest.raises(NeoXError, match="iteration 12: the loss has not been finite for 3 steps .* no checkpoint"):
        health.check(12, step(math.nan))


def test_fp16_may_search_for_a_scale_but_not_for_ever():
    health = Health(dynamic_loss_scale=True)
    for iteration in range(MAX_SKIPPED_STEPS - 1):
        assert health.check(iteration, step(math.inf if iteration % 2 else 1.0, skipped=True)) in (
            None,
            f"iteration {iteration}: the loss is inf",
        )
        assert health.is_good
    with pytest.raises(NeoXError, match="50 steps in a row were skipped"):
        health.check(60, step(skipped=True))


def test_skipped_steps_are_reported_outside_fp16():
    health = Health(dynamic_loss_scale=False)
    assert "gradient is not finite" in health.check(3, step(skipped=True))
