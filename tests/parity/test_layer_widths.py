"""Models whose widths differ between layers, and inside of them: against fp64, against themselves with a cache, and
against the uniform model where they are one."""

import pytest
import torch

from megatron.checkpointing.stamp import make_stamp
from megatron.model.gpt2_model import build_model, cross_entropy
from megatron.model.lora import qkv_parts
from tests.helpers.configs import tiny_args
from tests.helpers.layered_model import Layered
from tests.helpers.model_runs import SEQ, batch, forward_backward, named_parameters
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close
from tests.unit.test_generation_decoding import PROMPT, logits_of_steps, some_tokens

GQA = dict(hidden_size=80, num_attention_heads=6, num_kv_heads=2)
MHA = dict(hidden_size=56, num_attention_heads=3)
PROGRESSIVE = dict(schedule="progressive", base=10, exponent=0.6, multiple_of=2)
GROUPS = [[24, 3], {"layer": 1, "groups": [[16, 3], [40, 3]]}]
MIXED = [[(6, 2, 24)], [(3, 1, 16), (3, 1, 40)], [(6, 2, 24)]]

CASES = {
    "widening": (dict(GQA, head_dim=[[16, 1], [24, 1], [40, 1]]), [[(6, 2, 16)], [(6, 2, 24)], [(6, 2, 40)]]),
    "kv heads by layer, two row orders": (
        dict(GQA, num_kv_heads=[[6, 1], [3, 1], [1, 1]], head_dim=14, rotary_pct=0.6, gpt_j_residual=True),
        [[(6, 6, 14)], [(6, 3, 14)], [(6, 1, 14)]],
    ),
    "pattern, window": (
        dict(MHA, head_dim=[[[12, 20], "all"]], rotary_pct=0.5, sliding_window_width=4),
        [[(3, 3, 12)], [(3, 3, 20)], [(3, 3, 12)]],
    ),
    "progressive, relative bias": (
        dict(GQA, num_kv_heads=1, head_dim=PROGRESSIVE, pos_emb="rpe"),
        [[(6, 1, 10)], [(6, 1, 16)], [(6, 1, 20)]],
    ),
    "mixed": (dict(GQA, head_dim=GROUPS), MIXED),
    "mixed, one scale, half rotated": (dict(GQA, head_dim=GROUPS, softmax_scale=0.3, rotary_pct=0.5), MIXED),
    "mixed, joint norm": (dict(GQA, head_dim=GROUPS, use_qk_layernorm=True), MIXED),
    "mixed, alibi": (dict(GQA, head_dim=GROUPS, pos_emb="alibi"), MIXED),
    "mixed, relative bias, window": (dict(GQA, head_dim=GROUPS, pos_emb="rpe", sliding_window_width=5), MIXED),
    "mixed, all layers, two row orders": (
        dict(GQA, head_dim=[[8, 3], {"layer": [0, 1, 2], "groups": [[16, 2, 2], [12, 3, 1], [30, 1]]}],
             num_kv_heads=6),
        [[(2, 2, 16), (3, 1, 12), (1, 1, 30)]] * 3,
    ),
}  # fmt: skip


def model_and_args(name, **more):
    settings, heads = CASES[name]
    args = tiny_args(**settings, num_layers=3, ffn_hidden_size=32, **more)
    plain = Layered({**settings, "num_layers": 3, "ffn_hidden_size": 32, "pos_emb": args.pos_emb,
                     "no_weight_tying": True}, 128, heads)  # fmt: skip
    model = build_model(args)
    loaded = {}
    with torch.no_grad():
        for key, parameter in named_parameters(model):
            index, weight = key.split(".", 1)
            loaded[int(index), weight] = parameter
            parameter.copy_(plain.weights[int(index), weight])
    missing = {key for key in plain.weights if "slopes" not in key[1] and "rpe" not in key[1]} - set(loaded)
    assert not missing, missing
    return model, args, plain, loaded


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_fp64(name):
    model, args, plain, loaded = model_and_args(name)
    inputs, targets = batch()
    plain.weights = {key: value.requires_grad_() for key, value in plain.weights.items()}
    logits = plain.logits(inputs[0])
    assert logits.abs().max() > 1
    got = model(inputs)
    assert_close(got, logits.detach(), FORWARD, name)
    cross_entropy(args)(got, targets).backward()
    cross_entropy(args)(logits, targets).backward()
    for key, parameter in loaded.items():
        assert parameter.grad is not None and parameter.grad.any(), key
        assert_close(parameter.grad, plain.weights[key].grad, GRADIENT, f"{name} {key}")


@pytest.mark.parametrize("kind", ("global", "flash", "chunked"))
def test_each_kernel_runs_every_width(kind):
    for name in ("widening", "pattern, window", "mixed"):
        model, _, plain, _ = model_and_args(name, attention_config=[[[kind], 3]])
        inputs, _ = batch()
        assert_close(model(inputs), plain.logits(inputs[0]), FORWARD, name)


@pytest.mark.parametrize("name", CASES)
def test_cached_generation_is_recomputation(name):
    """By the layers' own forward passes, and by the step for one token where it covers the model."""
    model, args, _, _ = model_and_args(name)
    model.eval()
    tokens = some_tokens(2)
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad():
        whole = model((tokens, positions))[:, PROMPT - 1 :].transpose(0, 1)
    for use_step in (False, True):
        assert_close(logits_of_steps(args, model, tokens, use_step), whole, FORWARD, f"{name} {use_step}")


SAME = [[[24, 2]], [24, 24], [[[24], "all"]], [[40, 2], {"layer": [0, 1], "groups": [[24, 6]]}]]
"""As head_dim: 24."""


@pytest.mark.parametrize("written", SAME)
def test_equal_layers_are_the_uniform_model_to_the_last_bit(written):
    loss, initial, gradients = forward_backward(dict(GQA, head_dim=24))
    same_loss, same_initial, same_gradients = forward_backward(dict(GQA, head_dim=written))
    assert loss == same_loss and initial.keys() == same_initial.keys()
    for theirs, ours in ((initial, same_initial), (gradients, same_gradients)):
        assert all((theirs[name] == ours[name]).all() for name in theirs)
    assert make_stamp(tiny_args(**GQA, head_dim=24)) == make_stamp(tiny_args(**GQA, head_dim=written))


@pytest.mark.parametrize("keys_are_values", (False, True))
def test_groups_of_one_width_are_the_uniform_layer_with_other_rows(keys_are_values):
    """Norms of each head, rotation of a part, grouped queries: q, k and v of the first three heads, then the others."""
    shared = dict(GQA, qk_norm_type="per_head", norm="rmsnorm", rotary_pct=0.5, num_layers=1)
    shared.update(shared_key_value=keys_are_values, v_norm=keys_are_values)
    uniform, mixed = (
        build_model(tiny_args(**shared, head_dim=width))
        for width in (24, [[24, 1], {"layer": 0, "groups": [[24, 3], [24, 3]]}])
    )
    parts = [6 * 24, 2 * 24] if keys_are_values else [6 * 24, 2 * 24, 2 * 24]
    halves = zip(*(part.chunk(2) for part in torch.arange(sum(parts)).split(parts)), strict=True)
    rows = torch.cat([part for half in halves for part in half])
    theirs = dict(named_parameters(uniform))
    with torch.no_grad():
        for parameter in theirs.values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
        for name, parameter in named_parameters(mixed):
            whole = theirs[name.replace("groups.0.", "").replace("groups.1.", "")]
            parameter.copy_(whole[rows] if "query_key_value" in name else whole)
    inputs, _ = batch()
    assert inputs[0].shape[1] == SEQ
    assert_close(mixed(inputs), uniform(inputs), FORWARD)


def test_adapters_know_the_rows_of_each_group():
    """Of which part a row is: q, k and v of the grouped heads, then of the others, head by head."""
    args = tiny_args(**GQA, head_dim=[[24, 2], {"layer": 1, "groups": [[16, 4, 2], [40, 2, 2]]}])
    grouped, by_head = [0] * 64 + [1] * 32 + [2] * 32, ([0] * 40 + [1] * 40 + [2] * 40) * 2
    assert qkv_parts(args.head_geometry(1)).tolist() == grouped + by_head
    shared = tiny_args(**GQA, head_dim=24, shared_key_value=True)
    assert qkv_parts(shared.head_geometry(1)).tolist() == [0] * 144 + [1] * 48
