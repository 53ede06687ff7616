"""bf16 and fp16 train as fp32 does, up to rounding, with the same gradient norm in every layout."""

import numpy as np
import pytest

from tests.distributed.test_training_layouts import GPT2, figures, train_layouts, write_data
from tests.helpers.distributed import run_distributed

BF16 = dict(precision="bfloat16")
FP16 = dict(precision="fp16", fp16={"enabled": True, "initial_scale_power": 19, "hysteresis": 1})
"""The first loss scale, 2^19, overflows: steps are skipped until it fits."""
FP16_FITS = dict(precision="fp16", fp16={"enabled": True, "initial_scale_power": 10})

ONE_RANK = {"fp32": {}, "bf16": BF16, "bf16 pipeline module": dict(**BF16, pipe_parallel_size=1), "fp16": FP16_FITS}
TWO_RANKS = {
    "bf16 tp2": dict(**BF16, model_parallel_size=2),
    "bf16 pp2": dict(**BF16, pipe_parallel_size=2),
    "bf16 dp2 zero2": dict(**BF16, zero_optimization={"stage": 2}),
    "fp16 tp2": dict(**FP16_FITS, model_parallel_size=2),
    "fp16 pp2": dict(**FP16_FITS, pipe_parallel_size=2),
}


def train_in_half(rank, world_size, folder, layouts, model):
    """DeepSpeed refuses fp16 on most CPUs, though torch computes in it; what is tested is not the CPU."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True
    return train_layouts(rank, world_size, folder, layouts, model)


def refuse_fp16(rank, world_size, folder):
    from deepspeed.accelerator import get_accelerator

    from megatron.errors import BackendError

    type(get_accelerator()).is_fp16_supported = lambda self: False
    with pytest.raises(
        BackendError, match="precision=fp16: DeepSpeed does not train in fp16 on this cpu; use bfloat16"
    ):
        train_layouts(rank, world_size, folder, {"refused": FP16}, GPT2)


def test_half_precision(tmp_path):
    write_data(tmp_path)
    run_distributed(1, train_in_half, str(tmp_path), ONE_RANK, GPT2, tmp_path=tmp_path)
    run_distributed(2, train_in_half, str(tmp_path), TWO_RANKS, GPT2, tmp_path=tmp_path)
    wanted, evaluations = figures(tmp_path, "fp32")
    for name in [*ONE_RANK, *TWO_RANKS]:
        steps, others = figures(tmp_path, name)
        assert np.abs(steps[:, 0] - wanted[:, 0]).max() < 2e-2, name
        assert steps[:3, 1] == pytest.approx(wanted[:3, 1], rel=1e-2), name
        assert (steps[:, 2] == wanted[:, 2]).all(), name
        assert np.abs(others - evaluations).max() < 2e-2, name


def test_overflow_skips_steps(tmp_path):
    """Skipped steps change no weight, do not move the schedule, and end when the scale fits."""
    write_data(tmp_path)
    run_distributed(1, train_in_half, str(tmp_path), {"overflow": FP16}, GPT2, tmp_path=tmp_path)
    run_distributed(1, refuse_fp16, str(tmp_path), tmp_path=tmp_path)
    steps, _ = figures(tmp_path, "overflow")
    skipped = np.isnan(steps[:, 1].astype(float))
    assert skipped[0] and not skipped[-1]
    assert len(set(steps[skipped, 2])) == 1
