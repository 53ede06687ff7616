"""Gemma 4's dense text model, in and out: logits as transformers', tensors and configs unchanged; what is refused."""

import pytest
from transformers import Gemma4TextConfig

from tests.helpers.convert_models import check_family, hf_config

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
SHARE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0}
ROPE = {SLIDING: PLAIN, FULL: SHARE}
LAYERS = [SLIDING, SLIDING, FULL, SLIDING, FULL]
WIDE = dict(
    hidden_size=80,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=12,
    global_head_dim=40,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
)
"""80 % 6 != 0; a query width of 72 in the local layers and of 240 in the global ones, of which 5 pairs in 20 turn."""

CASES = {
    "wide": dict(WIDE, final_logit_softcapping=9.0),
    "published-pattern": dict(WIDE, num_hidden_layers=6, layer_types=None, sliding_window=512),
    "keys-and-values-apart-untied": dict(WIDE, attention_k_eq_v=False, tie_word_embeddings=False),
    "mqa-bias": dict(WIDE, num_global_key_value_heads=1, attention_bias=True, sliding_window=4),
    "as-many-keys": dict(WIDE, num_key_value_heads=6, num_global_key_value_heads=6, attention_bias=True),
    "narrow-linear": dict(
        WIDE,
        hidden_size=160,
        global_head_dim=20,
        rope_parameters={SLIDING: {**PLAIN, "rope_type": "linear", "factor": 3.0}, FULL: {**SHARE, "factor": 8.0}},
    ),
    "one-width": dict(
        WIDE, head_dim=24, global_head_dim=24, num_key_value_heads=2, rope_parameters={SLIDING: PLAIN, FULL: PLAIN}
    ),
    "global-only": dict(WIDE, layer_types=[FULL] * 3, num_hidden_layers=3, head_dim=40, num_key_value_heads=2),
}


def config_of(**changes) -> Gemma4TextConfig:
    """A config object; `changes` win over five layers of both types."""
    given = dict(
        num_hidden_layers=5, layer_types=LAYERS, sliding_window=7, rope_parameters=ROPE, hidden_size_per_layer_input=0
    )
    return hf_config("gemma4_text", **{**given, **changes})


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_in_and_out(changes):
    check_family(config_of(**changes))
