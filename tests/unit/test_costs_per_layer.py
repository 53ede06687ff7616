"""Costs of models whose layers differ in head_dim and num_kv_heads, or have heads of several widths, drawn at random:
the built model's parameters, torch's count of its operations, its allocated caches."""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron import costs
from megatron.errors import ConfigError
from megatron.model.attention.cache import KVCache
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import PER_LAYER
from tests.unit.test_costs_parameters import CHOICES, part_of

HEADS, LAYERS = 12, 4
WIDTHS = (6, 10, 14, 22, 34)
WINDOWS = dict(sliding_window_width=5, layer_types=[[["sliding_attention", "full_attention"], 2]])


def draw(seed):
    """A valid config of LAYERS layers with widths drawn for each, written in one of the forms; and the widths."""
    chance = random.Random(seed)
    while True:
        settings = {key: chance.choice(values) for key, values in CHOICES.items()}
        widths = [chance.choice(WIDTHS) for _ in range(LAYERS)]
        kv_heads = [chance.choice((1, 2, 4, HEADS)) for _ in range(LAYERS)]
        runs = chance.random() < 0.5
        settings.update(
            num_layers=LAYERS, hidden_size=chance.choice((56, 88)), num_attention_heads=HEADS,
            head_dim=[[width, 1] for width in widths] if runs else widths, num_kv_heads=kv_heads,
            attention_config=[[["global"], LAYERS]],
        )  # fmt: skip
        try:
            return tiny_args(**settings, **chance.choice(({}, WINDOWS))), widths, kv_heads
        except ConfigError:
            continue


def groups_of(chance):
    """Groups of HEADS heads, with key/value heads of their own."""
    first = chance.choice((2, 4, 8))
    sizes = (first, HEADS - first) if chance.random() < 0.6 else (4, 4, 4)
    return [[chance.choice(WIDTHS), heads, chance.choice([n for n in range(1, heads + 1) if not heads % n])]
            for heads in sizes]  # fmt: skip


def draw_mixed(seed):
    """A drawn config with groups of heads in two of its layers."""
    chance = random.Random(seed)
    while True:
        args, widths, _ = draw(chance.randrange(10**6))
        groups = {layer: groups_of(chance) for layer in chance.sample(range(LAYERS), 2)}
        items = [dict(layer=layer, groups=each) for layer, each in groups.items()]
        try:
            return args.update(head_dim=[*([width, 1] for width in widths), *items]), groups
        except ConfigError:
            continue


@pytest.mark.parametrize("seed", range(25))
def test_drawn_models(seed):
    """The widths are those that were drawn; parameters part by part; forward and backward operations; caches."""
    args, widths, kv_heads = draw(seed)
    geometries = [args.head_geometry(number) for number in range(LAYERS)]
    assert [geometry.head_dim for geometry in geometries] == widths
    assert [geometry.num_kv_heads for geometry in geometries] == kv_heads
    check(args)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_models_with_groups_of_heads(seed):
    args, groups = draw_mixed(seed)
    for layer, expected in groups.items():
        found = [[g.head_dim, g.num_attention_heads, g.num_kv_heads] for g in args.head_geometry(layer).groups]
        assert found == expected
    check(args)


def check(args):
    model = build_model(args)
    built = dict.fromkeys(costs.parameter_parts(args), 0)
    for name, parameter in model.named_parameters():
        built[part_of(name)] += parameter.numel()
    assert costs.parameter_parts(args) == built

    tokens = torch.zeros(2, args.seq_length, dtype=torch.int64)
    positions = torch.arange(args.seq_length).expand(2, -1)
    with FlopCounterMode(display=False) as forward:
        logits = model((tokens, positions))
    with FlopCounterMode(display=False) as backward:
        cross_entropy(args)(logits, (tokens, torch.ones(2, args.seq_length))).backward()
    expected = sum(costs.forward_flops(args, windows=False).values()) * tokens.numel()
    assert forward.get_total_flops() == expected
    assert backward.get_total_flops() == 2 * expected

    cache = KVCache(args, range(LAYERS), batch_size=3, max_tokens=20)
    assert costs.kv_cache_bytes(args, 3, 20) == cache.nbytes
    assert costs.kv_cache_bytes_per_token(args) == KVCache(args, range(LAYERS), batch_size=1, max_tokens=1).nbytes


@pytest.mark.parametrize("name", PER_LAYER)
def test_forms(name):
    """The forms of the helper, in bfloat16 caches: 2 bytes x (keys and values) x the width of every layer."""
    args = tiny_args(**PER_LAYER[name], precision="bfloat16")
    layers = [args.head_geometry(number) for number in range(args.num_layers)]
    assert len({layer.head_dim for layer in layers}) > 1
    assert costs.kv_cache_bytes_per_token(args) == sum(2 * 2 * g.num_kv_heads * g.head_dim for g in layers)
    built = sum(parameter.numel() for parameter in build_model(args).parameters())
    assert costs.num_parameters(args) == built


def test_decoding_meets_each_layers_own_keys():
    """Token by token, by hand: 4 · n·d for each key in a layer, up to its window."""
    args = tiny_args(**PER_LAYER["alternating"], **WINDOWS)
    weights = sum(costs.forward_flops(args, 1)[part] for part in ("qkv", "output", "mlp", "head"))
    # Layers 0 and 2: 20 wide with a window of 5; layers 1 and 3: 12 wide.
    assert costs.decode_flops(args, 30) == weights + 4 * 4 * 2 * (20 * 6 + 12 * 31)
    assert costs.forward_flops(args, 32)["scores"] == 2 * 4 * 2 * (20 * 6 + 12 * 32)
