"""TP 2 and TP 4 equal TP 1: the same initial weights, loss and every gradient, joined to the master."""

import numpy as np
import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4, MHA_TP4, NARROW, QUOTIENT, TP2, TP4, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import forward_backward
from tests.helpers.tolerances import GRADIENT, LOSS

SWIGLU = dict(activation="swiglu", norm="rmsnorm", ffn_hidden_size=48)
VARIANTS = {
    "gated": SWIGLU,
    "gated_sequence_parallel": dict(SWIGLU, sequence_parallel=True),
    "gpt_j": dict(gpt_j_residual=True),
    "gpt_j_tied_sequence_parallel": dict(gpt_j_residual=True, gpt_j_tied=True, sequence_parallel=True),
    "learned_tied_sequence_parallel": dict(pos_emb="learned", no_weight_tying=False, sequence_parallel=True),
    "flash": dict(attention_config=["flash"] * 2, rotary_pct=0.6),
    "qk_rmsnorm": dict(SWIGLU, use_qk_layernorm=True),
    "qk_scalenorm": dict(norm="scalenorm", use_qk_layernorm=True),
    "alibi": dict(pos_emb="alibi"),
    "rpe": dict(pos_emb="rpe"),
    "sinusoidal_no_biases": dict(pos_emb="sinusoidal", use_bias_in_mlp=False, use_bias_in_attn_linear=False),
    "hidden_dropout": dict(SWIGLU, hidden_dropout=0.3),
    "gpt_j_hidden_dropout": dict(gpt_j_residual=True, hidden_dropout=0.3, use_bias_in_mlp=False),
    "checkpointed": dict(SWIGLU, checkpoint_activations=True, checkpoint_num_layers=1, no_weight_tying=False),
}
EVERY_GEOMETRY = ("gated", "gpt_j")


def _cases(ranks):
    by_name = {2: TP2, 4: TP4}[ranks]
    cases = {
        f"{geometry} {variant}": {**numbers, **VARIANTS[variant]}
        for geometry, numbers in by_name.items()
        for variant in EVERY_GEOMETRY
    }
    numbers = {2: WIDE_NON_DIVISIBLE, 4: GQA_TP4}[ranks]
    cases.update({f"other {variant}": {**numbers, **settings} for variant, settings in VARIANTS.items()})
    return cases


def _rank(rank, world_size, cases):
    results = {name: forward_backward(dict(settings, model_parallel_size=world_size)) for name, settings in cases}
    return results if rank == 0 else [results[name][0] for name, _ in cases]


def _assert_equal(name, one, many):
    loss, initial, gradients = many
    assert abs(loss - one[0]) <= LOSS, f"{name}: loss {loss} is not {one[0]}"
    assert initial.keys() == one[1].keys() and gradients.keys() == one[2].keys(), name
    for key, values in initial.items():
        assert np.array_equal(values, one[1][key]), f"{name}: initial {key} depends on the layout"
    for key, values in gradients.items():
        difference = np.abs(values - one[2][key]).max()
        assert difference <= GRADIENT[torch.float32], f"{name}: gradient of {key} differs by {difference:.2g}"


@pytest.mark.parametrize("ranks", (2, 4))
def test_tensor_parallel_equals_one_rank(ranks, tmp_path):
    cases = list(_cases(ranks).items())
    (single,) = run_distributed(1, _rank, cases, tmp_path=tmp_path)
    first, *others = run_distributed(ranks, _rank, cases, tmp_path=tmp_path)
    for number, (name, settings) in enumerate(cases):
        _assert_equal(name, single[name], first[name])
        assert all(losses[number] == first[name][0] for losses in others), f"{name}: ranks disagree on the loss"
        if not settings.get("gpt_j_tied"):
            assert single[name][1].keys() == single[name][2].keys(), f"{name}: a parameter gets no gradient"


def test_the_cases_tell_layouts_apart():
    """Grouped and ungrouped attention, gated and plain MLPs are all among the cases."""
    assert "num_kv_heads" in NARROW and "num_kv_heads" not in MHA_TP4 and "head_dim" not in QUOTIENT
