"""QK norms, zero-centred norms and the QKV bias at TP 1, 2 and 4: loss, every gradient, gradient norm, training."""

import numpy as np
import pytest
import torch

from megatron.training import train_step
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.engines import _batches, build_engine
from tests.helpers.geometries import GQA_TP4
from tests.helpers.model_runs import forward_backward
from tests.helpers.tolerances import GRADIENT, LOSS, TRAJECTORY

RMS, CENTRED = dict(norm="rmsnorm"), dict(zero_centered_gamma=True)
PER_HEAD, FULL = dict(qk_norm_type="per_head"), dict(qk_norm_type="full_width")
QKV_BIAS = dict(use_bias_in_attn_linear=False, add_qkv_bias=True)
SHARED = dict(num_kv_heads=2)
"""Two ranks of TP 4 have the same key head; not shared at TP 1 and 2."""
ONE = dict(num_kv_heads=1)
"""Four ranks have 2, 3, 2 and 3 of its 10 rows."""
CASES = {
    "joint rmsnorm": dict(RMS, qk_norm_type="joint", **QKV_BIAS),
    "per_head rmsnorm": dict(RMS, **PER_HEAD, attention_config=["flash"] * 2),
    "per_head rmsnorm, sequence parallel, zero-centred": dict(RMS, **PER_HEAD, **CENTRED, sequence_parallel=True),
    "per_head layernorm, zero-centred, shared keys": dict(PER_HEAD, **CENTRED, **SHARED),
    "per_head scalenorm, one key head": dict(PER_HEAD, norm="scalenorm", **ONE),
    "full_width rmsnorm, QKV bias": dict(RMS, **FULL, **QKV_BIAS, attention_config=["flash"] * 2),
    "full_width rmsnorm, shared keys, zero-centred": dict(RMS, **FULL, **SHARED, **CENTRED),
    "full_width rmsnorm, sequence parallel, one key head": dict(RMS, **FULL, **ONE, sequence_parallel=True),
    "full_width layernorm": dict(FULL),
    "full_width layernorm, shared keys, QKV bias, zero-centred": dict(FULL, **SHARED, **QKV_BIAS, **CENTRED),
    "full_width non-parametric": dict(FULL, **SHARED, norm="non_parametric_layernorm"),
}
TRAINED = ("per_head rmsnorm, sequence parallel, zero-centred", "full_width rmsnorm, shared keys, zero-centred")
STEPS = 3


def _settings(name, ranks):
    return {**GQA_TP4, **CASES[name], "model_parallel_size": ranks}


def _trained(name, ranks):
    """[(loss, norm of the gradient)] of a few clipped optimizer steps."""
    args = tiny_args(**_settings(name, ranks), global_num_gpus=ranks, gradient_clipping=0.1, weight_decay=0.1)
    engine = build_engine(args)
    engine.train()
    records = [train_step(args, engine, _batches(args, step)) for step in range(STEPS)]
    return [(record["loss"], record["grad_norm"]) for record in records]


def _rank(rank, ranks):
    runs = {name: forward_backward(_settings(name, ranks)) for name in CASES}
    trained = {name: _trained(name, ranks) for name in TRAINED}
    return (runs, trained) if rank == 0 else None


def _assert_equal(name, one, many):
    loss, initial, gradients = many
    assert abs(loss - one[0]) <= LOSS, f"{name}: loss {loss} is not {one[0]}"
    assert initial.keys() == one[1].keys() == gradients.keys() == one[2].keys(), name
    for key, values in initial.items():
        assert np.array_equal(values, one[1][key]), f"{name}: initial {key} depends on the layout"
    for key, values in gradients.items():
        size = np.abs(one[2][key]).max()  # those of norms on queries and keys are small: relative to their size
        difference = np.abs(values - one[2][key]).max() / size
        assert size > 1e-6 and difference <= GRADIENT[torch.float32], f"{name}: {key} {difference:.2g} of {size:.2g}"


@pytest.mark.timeout(120)
def test_tp_2_and_4_equal_tp_1(tmp_path):
    (one,) = run_distributed(1, _rank, tmp_path=tmp_path)
    for ranks in (2, 4):
        runs, trained = run_distributed(ranks, _rank, tmp_path=tmp_path)[0]
        for name in CASES:
            _assert_equal(f"TP {ranks}, {name}", one[0][name], runs[name])
        for name in TRAINED:
            apart = np.abs(np.array(trained[name]) - np.array(one[1][name])).max()
            assert apart <= TRAJECTORY, f"TP {ranks}, {name}: {trained[name]} is not {one[1][name]}"
