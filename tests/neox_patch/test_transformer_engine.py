"""In patched checkouts a model with te_mha is the model with GPT-NeoX's own attention, its rows in another order."""

import pytest

from tests.helpers.geometries import GQA_TP4, MHA, MHA_TP4, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.te import requires_te
from tests.helpers.tolerances import GRADIENT, LOSS, assert_close
from tests.neox_patch import checkouts

pytestmark = requires_te

BIASES = dict(use_bias_in_attn_linear=True, use_bias_in_mlp=True, activation="gelu", intermediate_size=256)
GPT_J = dict(BIASES, gpt_j_residual=True, norm="layernorm")
"""The layer adds up over the ranks what attention and the MLP leave."""

CASES = {
    1: {
        "wide": WIDE_NON_DIVISIBLE,
        "narrow partial rotary": dict(NARROW, **BIASES, rotary_pct=0.5),
        "mha window scale": dict(MHA, sliding_window_width=5, softmax_scale=0.4),
        "learned positions": dict(GQA_TP4, **GPT_J, pos_emb="learned"),
    },
    2: {
        "wide": dict(WIDE_NON_DIVISIBLE, **BIASES),
        "gpt_j": dict(GQA_TP4, **GPT_J),
        "mha sequence parallel": dict(MHA_TP4, sequence_parallel=True),
        "gpt_j sequence parallel": dict(MHA_TP4, **GPT_J, sequence_parallel=True, softmax_scale=0.4),
    },
}
GENERATED = {1: ("wide", "narrow partial rotary", "learned positions"), 2: ("gpt_j",)}


@pytest.mark.parametrize("tp", [1, 2])
def test_te_mha_is_the_same_model(new, state, tp, tmp_path, monkeypatch):
    if not (new / "megatron/head_dim/te_attention.py").exists():
        pytest.skip("this state has no te_mha")
    program = checkouts.PROGRAM.with_name("run_transformer_engine.py")
    monkeypatch.setattr(checkouts, "PROGRAM", program)
    ids = checkouts.tokens()
    cases = [
        checkouts.case(
            name,
            {**checkouts.MODEL, **values},
            ids,
            do=["backward"] + ["generate"] * (name in GENERATED[tp]),
            prompts=[[5, 7, 11], [3, 1, 4, 1, 5]],
        )
        for name, values in CASES[tp].items()
    ]
    for name, ranks in checkouts.run_cases(new, cases, tp=tp, folder=tmp_path).items():
        for result in ranks:
            _compare(f"{state} tp {tp} {name}", result["native"], result["te"])


def _compare(what, native, te):
    for result in (native, te):
        assert "error" not in result, f"{what}:\n{result['traceback']}"
    assert_close(te["logits"], native["logits"], what=f"{what}: logits")
    assert te["loss"] == pytest.approx(native["loss"], abs=LOSS), what
    assert te["grads"].keys() == native["grads"].keys(), what
    for name, gradient in native["grads"].items():
        assert_close(te["grads"][name], gradient, GRADIENT, f"{what}: gradient of {name}")
    if "cached" in native:
        assert te["cached"] == te["recomputed"] == native["recomputed"], what
