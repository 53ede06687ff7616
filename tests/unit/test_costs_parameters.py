"""Parameter counts of randomly drawn configs, part by part, against the modules that are built."""

import random

import pytest

from megatron import costs
from megatron.errors import ConfigError
from megatron.model.gpt2_model import build_model
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL

CHOICES = dict(
    pos_emb=["rotary", "learned", "sinusoidal", "alibi", "rpe", "none"],
    norm=["layernorm", "rmsnorm", "scalenorm", "non_parametric_layernorm"],
    norm_placement=["pre", "sandwich", "post"],
    activation=["gelu", "swiglu", "geglu", "relu"],
    qk_norm_type=[None, "joint", "per_head", "full_width"],
    shared_key_value=[False, False, True],
    layer_scalar=[False, True],
    v_norm=[False, True],
    gpt_j_residual=[False, True],
    gpt_j_tied=[False, True],
    no_weight_tying=[False, True],
    use_bias_in_attn_linear=[False, True],
    add_qkv_bias=[None, False, True],
    use_bias_in_mlp=[False, True],
    use_bias_in_output_layer=[False, True],
    num_layers=[1, 3],
    ffn_hidden_size=[None, 52],
)


def draw(seed):
    """The first drawn config that is a valid one."""
    chance = random.Random(seed)
    while True:
        settings = {key: chance.choice(values) for key, values in CHOICES.items()}
        try:
            return tiny_args(**ALL[chance.choice(sorted(ALL))], **settings)
        except ConfigError:
            continue


def part_of(name):
    """The part that a parameter of the built model belongs to, by its name."""
    if "word_embeddings" in name:
        return "embedding"
    if "position_embeddings" in name or "rpe" in name:
        return "positions"
    if "final_linear" in name:
        return "head"
    if "norm" in name:
        return "norms"
    return "attention" if ".attention." in name else "mlp"


@pytest.mark.parametrize("seed", range(40))
def test_every_part_is_that_of_the_built_model(seed):
    args = draw(seed)
    built = dict.fromkeys(costs.parameter_parts(args), 0)
    for name, parameter in build_model(args).named_parameters():  # what is shared comes once
        built[part_of(name)] += parameter.numel()
    assert costs.parameter_parts(args) == built
    assert costs.num_parameters(args) == sum(built.values())


def test_the_draws_differ():
    """The grid is one: each choice is drawn."""
    drawn = [draw(seed) for seed in range(40)]
    for key, values in CHOICES.items():
        if key not in ("add_qkv_bias", "ffn_hidden_size", "use_bias_in_output_layer", "gpt_j_tied"):
            assert {getattr(args, key) for args in drawn} >= set(values) - {None}, key
