"""Adapters at TP 2 and 4 equal those at TP 1: initial values, loss and every gradient; nothing else has a gradient."""

import pytest

from tests.distributed.test_model_tensor_parallel import _assert_equal
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import MHA_TP4, MIXED, NARROW, PER_LAYER, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import forward_backward

LORA = dict(rank=3, alpha=5.0, targets=["query_key_value", "dense", "linear1", "linear2"])
SWIGLU = dict(activation="swiglu", norm="rmsnorm", ffn_hidden_size=48)
VARIANTS = {
    "gated": SWIGLU,
    "gated_sequence_parallel": dict(SWIGLU, sequence_parallel=True),
    "gpt_j": dict(gpt_j_residual=True),
    "gpt_j_sequence_parallel": dict(gpt_j_residual=True, sequence_parallel=True, no_weight_tying=False),
    "checkpointed": dict(SWIGLU, checkpoint_activations=True, no_weight_tying=False),
}
DROPPED = dict(LORA, dropout=0.4, targets=["query_key_value", "linear1"])
"""Of what all ranks have alike."""
CASES = {
    2: {
        "dropout": {**MHA_TP4, "lora": DROPPED},
        **{f"per rank {name}": {**WIDE_NON_DIVISIBLE, **settings} for name, settings in VARIANTS.items()},
        "per head": {**MHA_TP4, **SWIGLU},
        "widths by layer": {**PER_LAYER["widening"], **SWIGLU},
        "groups of heads": {**MIXED["gqa"], "gpt_j_residual": True},
    },
    4: {"ranks share heads": {**NARROW, **SWIGLU, "sequence_parallel": True}, "per head": {**MHA_TP4}},
}
"""By number of ranks."""


def _rank(rank, world_size, cases):
    results = {name: forward_backward(dict(settings, model_parallel_size=world_size)) for name, settings in cases}
    return results if rank == 0 else [results[name][0] for name, _ in cases]


@pytest.mark.parametrize("ranks", (2, 4))
def test_tensor_parallel_equals_one_rank(ranks, tmp_path):
    cases = [(name, {"lora": LORA, **settings}) for name, settings in CASES[ranks].items()]
    (single,) = run_distributed(1, _rank, cases, tmp_path=tmp_path)
    first, *others = run_distributed(ranks, _rank, cases, tmp_path=tmp_path)
    for number, (name, settings) in enumerate(cases):
        _assert_equal(name, single[name], first[name])
        assert all(losses[number] == first[name][0] for losses in others), f"{name}: ranks disagree on the loss"
        trained = set(first[name][2])
        assert trained == {key for key in first[name][1] if ".lora." in key}
        assert len(trained) == 2 * len(settings["lora"]["targets"]) * settings.get("num_layers", 2)
        assert all(abs(gradient).max() > 0 for gradient in first[name][2].values()), name


def test_dropout_of_what_ranks_hold_parts_of_leaves_copies_equal(tmp_path):
    """Others are dropped then than on one rank; forward_backward compares the gradients of what all ranks have."""
    settings = dict(WIDE_NON_DIVISIBLE, lora=dict(LORA, dropout=0.4), **SWIGLU)
    cases = [(str(parallel), dict(settings, sequence_parallel=parallel)) for parallel in (False, True)]
    first, second = run_distributed(2, _rank, cases, tmp_path=tmp_path)
    for number, (name, _) in enumerate(cases):
        assert second[number] == first[name][0]
        assert all(abs(gradient).max() > 0 for gradient in first[name][2].values()), name
    assert first["False"][0] != first["True"][0], "nothing was dropped"
