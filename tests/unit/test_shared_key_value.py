"""Keys that are values too, the norm on values and a layer's scalar, each against the model without it."""

import pytest
import torch

from megatron.checkpointing.stamp import check_stamp, read_stamp, write_stamp
from megatron.errors import CheckpointError, ConfigError
from megatron.geometry import HeadGeometry
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, MQA, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import batch
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

GEOMETRIES = {"mha": MHA, "mqa": MQA, "gqa": WIDE_NON_DIVISIBLE}
FULL, SLIDING = "full_attention", "sliding_attention"


def rows_apart(geometry, fused):
    """[(n + m)·d, ...] -> [(n + 2m)·d, ...] with the key rows twice, head by head."""
    heads = fused.unflatten(0, (-1, geometry.head_dim))
    n, m = geometry.num_attention_heads, geometry.num_kv_heads
    if n == m:
        return torch.cat([x for head in range(n) for x in (heads[2 * head], heads[2 * head + 1], heads[2 * head + 1])])
    return torch.cat([heads[:n], heads[n:], heads[n:]]).flatten(0, 1)


def loss_and_gradients(args, model):
    (tokens, positions), targets = batch()
    logits = model((tokens, positions))
    cross_entropy(args)(logits, targets).backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options", [dict(), dict(v_norm=True, qk_norm_type="per_head", norm="rmsnorm")], ids=["", "norms"]
)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_it_is_a_model_whose_value_rows_are_its_key_rows(name, options):
    args = tiny_args(**GEOMETRIES[name], **options, init_method_std=0.2, shared_key_value=True)
    apart_args = args.update(shared_key_value=False)
    geometry, apart = args.head_geometry(), apart_args.head_geometry()
    assert apart.qkv_hidden_size - geometry.qkv_hidden_size == geometry.kv_hidden_size
    shared_model, model = build_model(args), build_model(apart_args)
    weights = shared_model.state_dict()
    model.load_state_dict(
        {key: rows_apart(geometry, x) if "query_key_value" in key else x for key, x in weights.items()}
    )
    logits, gradients = loss_and_gradients(args, shared_model)
    expected, of_apart = loss_and_gradients(apart_args, model)
    assert expected.std() > 0.1, "the comparison would see nothing"
    assert_close(logits, expected, FORWARD)
    for key, gradient in gradients.items():
        if "query_key_value" in key:
            # The key rows have the gradients of both: what the transposed copy gives.
            index = rows_apart(geometry, torch.arange(geometry.qkv_hidden_size))
            wanted = torch.zeros_like(gradient).index_add_(0, index, of_apart[key])
        else:
            wanted = of_apart[key]
        assert_close(gradient, wanted, GRADIENT, key)


def test_values_are_divided_by_their_root_mean_square():
    """Through the whole attention, from its own q, k and v, in fp64."""
    args = tiny_args(
        **WIDE_NON_DIVISIBLE, v_norm=True, rms_norm_epsilon=0.1, pos_emb="none", use_bias_in_attn_linear=False
    )
    attention = build_model(args).sequential[2].attention.double()
    hidden = torch.randn(7, 2, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3
    geometry = args.head_geometry()
    q, k, v = (hidden @ attention.query_key_value.weight.detach().T).split([144, 48, 48], -1)
    q, k, v = (x.unflatten(-1, (-1, geometry.head_dim)) for x in (q, k, v))
    v = v / (v.square().mean(-1, keepdim=True) + 0.1).sqrt()
    k, v = (x.repeat_interleave(3, 2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / 24**0.5
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    context = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), v).flatten(2)
    assert_close(attention(hidden)[0], context @ attention.dense.weight.T, FORWARD)


@pytest.mark.parametrize("residual", [dict(), dict(gpt_j_residual=True)], ids=["normal", "gpt_j"])
def test_a_layer_is_multiplied_by_a_number_that_is_not_trained(residual):
    args = tiny_args(**WIDE_NON_DIVISIBLE, **residual, layer_scalar=True)
    model, plain = build_model(args), build_model(args.update(layer_scalar=False))
    layers, plain_layers = (x.sequential[2:4] for x in (model, plain))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [layer.layer_scalar.tolist() for layer in layers] == [[1.0], [1.0]]
    state = model.state_dict()
    state["sequential.2.layer_scalar"][:], state["sequential.3.layer_scalar"][:] = 0.5, -1.75
    model.load_state_dict(state)
    hidden = torch.randn(5, 2, 80, generator=torch.Generator().manual_seed(3))
    for layer, other, number in zip(layers, plain_layers, (0.5, -1.75), strict=True):
        assert_close(layer(hidden), other(hidden) * number, FORWARD)


def test_the_stamp_knows(tmp_path):
    """Shapes cannot tell 2 key heads that are values too from 1 key and 1 value head."""
    args = tiny_args(**WIDE_NON_DIVISIBLE, shared_key_value=True)
    one = HeadGeometry.from_config(80, 6, 2, 24, shared_key_value=True)
    assert one.qkv_hidden_size == HeadGeometry.from_config(80, 6, 1, 24).qkv_hidden_size
    write_stamp(args, str(tmp_path))
    check_stamp(args, str(tmp_path))
    assert read_stamp(str(tmp_path))["layers"][0]["geometry"]["shared_key_value"] is True
    assert HeadGeometry.from_stamp(one.stamp()) == one
    assert "shared_key_value" not in HeadGeometry.from_config(80, 6, 2, 24).stamp(), "older readers know no such key"
    with pytest.raises(CheckpointError, match="shared_key_value: True in the checkpoint, None in the config"):
        check_stamp(args.update(shared_key_value=False), str(tmp_path))
    write_stamp(args.update(shared_key_value=False), str(tmp_path))
    with pytest.raises(CheckpointError, match="shared_key_value: None in the checkpoint, True in the config"):
        check_stamp(args, str(tmp_path))


def test_by_layer_type():
    types = [SLIDING, FULL]
    args = tiny_args(**MHA, layer_types=types, sliding_window_width=3, shared_key_value={FULL: True})
    assert [args.head_geometry(number).shared_key_value for number in (0, 1)] == [False, True]
    weights = build_model(args).state_dict()
    assert [weights[f"sequential.{index}.attention.query_key_value.weight"].shape[0] for index in (2, 3)] == [144, 96]
    for value, message in (
        ({"global": True}, r"shared_key_value={'global': True} must be true or false, or map full_attention and"),
        ({FULL: 1}, "must be true or false, or map"),
        ({}, "must be true or false, or map"),
    ):
        with pytest.raises(ConfigError, match=message):
            args.update(shared_key_value=value)
