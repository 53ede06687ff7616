"""Attention heads whose width is not hidden_size / num_attention_heads: arguments, shapes, numbers, presets.

Runs on a CPU, in one process: `pytest tests/unit/test_head_dim.py`. The numbers are those of attention written out with
einsum in double precision here. Tensor parallelism is tried by building the layer of each rank, and adding up.
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

try:
    from megatron import mpu
    from megatron.errors import CheckpointError, ConfigError
    from megatron.geometry import HeadGeometry
    from megatron.head_dim.config import head_geometry
    from megatron.head_dim.stamp import check_head_geometry, write_head_geometry
    from megatron.model.transformer import ParallelMLP, ParallelSelfAttention
    from megatron.mpu import initialize as mpu_state
    from megatron.neox_arguments import NeoXArgs
except ImportError as error:
    if (error.name or "megatron").startswith("megatron"):
        raise
    pytest.skip(f"GPT-NeoX cannot be imported here: {error}", allow_module_level=True)

pytestmark = pytest.mark.cpu
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SEQUENCE, BATCH = 7, 2
TOLERANCE = 1e-5  # single precision, values around 1

WIDE = dict(hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=24)  # 80 / 6 is no whole number
NARROW = dict(hidden_size=160, num_attention_heads=4, num_kv_heads=2, head_dim=24)
MHA = dict(hidden_size=56, num_attention_heads=3, head_dim=16)
MHA_WIDE = dict(hidden_size=40, num_attention_heads=4, num_kv_heads=4, head_dim=16)
MQA = dict(hidden_size=40, num_attention_heads=5, num_kv_heads=1, head_dim=12)
PLAIN = dict(hidden_size=64, num_attention_heads=4)
PLAIN_GQA = dict(hidden_size=96, num_attention_heads=6, num_kv_heads=3)
GEOMETRIES = dict(wide=WIDE, narrow=NARROW, mha=MHA, mha_wide=MHA_WIDE, mqa=MQA, plain=PLAIN, plain_gqa=PLAIN_GQA)


@pytest.fixture(autouse=True)
def one_process_on_a_cpu(monkeypatch):
    """No process group, no GPU, no state of its random numbers."""
    monkeypatch.setattr(mpu_state, "_MPU_WORLD_SIZE", 1)
    monkeypatch.setattr(mpu_state, "_MPU_RANK", 0)
    monkeypatch.setattr(mpu, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def arguments(**changes):
    values = dict(
        num_layers=2,
        seq_length=SEQUENCE,
        max_position_embeddings=SEQUENCE,
        pos_emb="rotary",
        norm="rmsnorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        train_micro_batch_size_per_gpu=1,
        use_cpu_initialization=True,
        global_num_gpus=changes.get("model_parallel_size", 1),
    )
    return NeoXArgs.from_dict(dict(values, **changes))


def mask_out(scores, mask):
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min)


def attention_layer(neox_args, **options):
    torch.manual_seed(0)

    def init_method(tensor):
        return torch.nn.init.normal_(tensor, std=0.2)

    layer = ParallelSelfAttention(
        neox_args=neox_args,
        attention_mask_func=mask_out,
        init_method=init_method,
        output_layer_init_method=init_method,
        layer_number=0,
        rotary=neox_args.pos_emb == "rotary",
        **options,
    )
    for name, parameter in layer.named_parameters():
        if "query_key_value" not in name and "dense.weight" not in name:  # norms and biases begin at 1 and 0
            torch.nn.init.normal_(parameter, mean=0.7, std=0.3)
    return layer.eval()


def hidden_states(neox_args):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SEQUENCE, BATCH, neox_args.hidden_size, generator=generator)


def causal_mask(length=SEQUENCE):
    return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]


def run(layer, states):
    output, bias = layer(states, causal_mask(states.shape[0]))
    return output if bias is None else output + bias


def widths(neox_args):
    """(query heads, key/value heads, head width), as the arguments say it."""
    heads = neox_args.num_attention_heads
    return heads, neox_args.num_kv_heads or heads, neox_args.head_dim or neox_args.hidden_size // heads


def expected(neox_args, weights, states):
    """Attention in double precision, from the layer's weights by name."""
    weights = {name: value.double() for name, value in weights.items()}
    heads, kv_heads, width = widths(neox_args)
    query, key, value = split_qkv(weights, states.double(), heads, kv_heads, width)
    query, key = (norm(neox_args, weights, part, name) for part, name in ((query, "q"), (key, "k")))
    if neox_args.pos_emb == "rotary":
        count = int(width * neox_args.rotary_pct)
        query, key = (rotated(part, count, neox_args.rotary_emb_base) for part in (query, key))
    key, value = (part.repeat_interleave(heads // kv_heads, dim=2) for part in (key, value))
    scale = width**-0.5 if neox_args.softmax_scale is None else neox_args.softmax_scale
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) * scale
    scores = scores.masked_fill(causal_mask(), -float("inf"))
    context = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), value)
    output = context.reshape(SEQUENCE, BATCH, heads * width) @ weights["dense.weight"].t()
    return output + weights.get("dense.bias", 0.0)


def split_qkv(weights, states, heads, kv_heads, width):
    """Queries [s, b, n, d], keys and values [s, b, m, d]. Rows are by head without, and by kind with shared heads."""
    mixed = states @ weights["query_key_value.weight"].t() + weights.get("query_key_value.bias", 0.0)
    if heads == kv_heads:
        mixed = mixed.reshape(SEQUENCE, BATCH, heads, 3, width)
        return mixed[..., 0, :], mixed[..., 1, :], mixed[..., 2, :]
    parts = mixed.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
    return [part.reshape(SEQUENCE, BATCH, -1, width) for part in parts]


def norm(neox_args, weights, part, name):
    scale = weights.get(f"{name}_layernorm.scale")
    if scale is None:
        return part
    mean_square = part.pow(2).mean(-1, keepdim=True)
    return part / (mean_square + neox_args.rms_norm_epsilon).sqrt() * scale


def rotated(part, count, base):
    """The first `count` numbers of a head, as pairs (i, i + count / 2), turned by position * base ** (-2i / count)."""
    angles = torch.arange(SEQUENCE).double()[:, None] * base ** (-torch.arange(0, count, 2).double() / count)
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
    first, second, rest = part.split([count // 2, count // 2, part.shape[-1] - count], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def assert_close(actual, wanted, tolerance=TOLERANCE):
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted).abs().max().item() < tolerance * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_widths(geometry):
    neox_args = arguments(**GEOMETRIES[geometry])
    heads, kv_heads, width = widths(neox_args)
    shapes = {name: tuple(value.shape) for name, value in attention_layer(neox_args).state_dict().items()}
    assert shapes == {
        "query_key_value.weight": ((heads + 2 * kv_heads) * width, neox_args.hidden_size),
        "query_key_value.bias": ((heads + 2 * kv_heads) * width,),
        "dense.weight": (neox_args.hidden_size, heads * width),
        "dense.bias": (neox_args.hidden_size,),
    }


@pytest.mark.parametrize("options", [{}, dict(rotary_pct=0.5), dict(pos_emb="none"), dict(softmax_scale=0.4)], ids=str)
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_output(geometry, options):
    neox_args = arguments(**dict(GEOMETRIES[geometry], **options))
    layer, states = attention_layer(neox_args), hidden_states(neox_args)
    assert_close(run(layer, states), expected(neox_args, layer.state_dict(), states))


@pytest.mark.parametrize("geometry", ["wide", "mha", "mqa", "plain"])
def test_norms_of_each_head(geometry):
    neox_args = arguments(qk_norm_type="per_head", rms_norm_epsilon=1e-6, **GEOMETRIES[geometry])
    layer, states = attention_layer(neox_args), hidden_states(neox_args)
    weights = layer.state_dict()
    assert weights["q_layernorm.scale"].shape == weights["k_layernorm.scale"].shape == (widths(neox_args)[2],)
    assert not torch.equal(weights["q_layernorm.scale"], weights["k_layernorm.scale"])
    assert_close(run(layer, states), expected(neox_args, weights, states))


@pytest.mark.parametrize("geometry", ["wide", "narrow", "mha_wide"])
def test_gradients(geometry):
    neox_args = arguments(**GEOMETRIES[geometry])
    layer, states = attention_layer(neox_args), hidden_states(neox_args)
    run(layer, states).pow(2).sum().backward()
    copies = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}
    expected(neox_args, copies, states).pow(2).sum().backward()
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, copies[name].grad, 1e-4)


@pytest.mark.parametrize("geometry", ["wide", "mha"])
def test_one_token_at_a_time(geometry):
    neox_args = arguments(**GEOMETRIES[geometry])
    layer, states = attention_layer(neox_args, use_cache=True), hidden_states(neox_args)
    (output, past), bias = layer(states[:4], causal_mask(4))
    outputs = [output + bias]
    for position in range(4, SEQUENCE):
        seen = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        (output, past), bias = layer(states[position : position + 1], seen, layer_past=past)
        outputs.append(output + bias)
    assert past.shape[-1] == widths(neox_args)[2]
    assert_close(torch.cat(outputs), expected(neox_args, layer.state_dict(), states))


@pytest.mark.parametrize("geometry", ["wide", "narrow", "mha_wide"])
def test_two_tensor_parallel_ranks(geometry, monkeypatch):
    whole_args = arguments(**GEOMETRIES[geometry])
    whole, states = attention_layer(whole_args).state_dict(), hidden_states(whole_args)
    heads, kv_heads, width = (number for number in widths(whole_args))
    monkeypatch.setattr(mpu_state, "_MPU_WORLD_SIZE", 2)
    total = 0.0
    for rank in range(2):
        monkeypatch.setattr(mpu_state, "_MPU_RANK", rank)
        neox_args = arguments(model_parallel_size=2, **GEOMETRIES[geometry])
        layer = attention_layer(neox_args, parallel_output=True)
        layer.load_state_dict(
            {
                "query_key_value.weight": rank_rows(whole["query_key_value.weight"], rank, heads, kv_heads, width),
                "query_key_value.bias": rank_rows(whole["query_key_value.bias"], rank, heads, kv_heads, width),
                "dense.weight": whole["dense.weight"].chunk(2, dim=1)[rank],
                "dense.bias": whole["dense.bias"] / 2,
            }
        )
        total = total + run(layer, states)
    assert_close(total, expected(whole_args, whole, states))


def rank_rows(rows, rank, heads, kv_heads, width):
    """The share of a rank: of queries, keys and values each if they are apart, of all rows if they are by head."""
    kinds = [3 * heads] if heads == kv_heads else [heads, kv_heads, kv_heads]
    return torch.cat([part.chunk(2)[rank] for part in rows.split([kind * width for kind in kinds])])


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("geometry", ["plain", "plain_gqa"])
def test_the_quotient_given_is_the_quotient_derived(geometry, joint):
    """joint with layernorm: before 2025 GPT-NeoX's rmsnorm is over one dimension only."""
    widths_only = dict(GEOMETRIES[geometry], norm="layernorm")
    derived = arguments(use_qk_layernorm=joint, **widths_only)
    given = arguments(use_qk_layernorm=joint, head_dim=widths(derived)[2], **widths_only)
    named = arguments(qk_norm_type="joint" if joint else None, **widths_only)
    layers, states = [attention_layer(neox_args) for neox_args in (derived, given, named)], hidden_states(derived)
    for layer in layers[1:]:
        assert list(layer.state_dict()) == list(layers[0].state_dict())
        assert torch.equal(run(layer, states), run(layers[0], states))


@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_geometry(geometry):
    neox_args = arguments(rotary_pct=0.5, **GEOMETRIES[geometry])
    heads, kv_heads, width = widths(neox_args)
    found = head_geometry(neox_args)
    assert (found.num_attention_heads, found.num_kv_heads, found.head_dim) == (heads, kv_heads, width)
    assert found.rotary_ndims == width // 2
    assert found.qkv_hidden_size == (heads + 2 * kv_heads) * width
    assert HeadGeometry.from_stamp(found.stamp()) == found


def test_record_beside_a_checkpoint(tmp_path):
    """8 heads of 16 and 4 of 32 have tensors of equal shapes."""
    (tmp_path / "global_step3").mkdir()
    saved = arguments(hidden_size=64, num_attention_heads=8, head_dim=16)
    write_head_geometry(saved, str(tmp_path), "global_step3")
    check_head_geometry(saved, str(tmp_path), "global_step3")
    other = arguments(hidden_size=64, num_attention_heads=4, head_dim=32)
    with pytest.raises(CheckpointError, match="head_dim"):
        check_head_geometry(other, str(tmp_path), "global_step3")


REFUSED = [
    (dict(head_dim="24"), ["head_dim='24'"]),
    (dict(head_dim=24.0), ["head_dim=24.0"]),
    (dict(head_dim=True), ["head_dim=True"]),
    (dict(head_dim=0), ["head_dim=0"]),
    (dict(head_dim=[24]), ["head_dim=[24]"]),
    (dict(head_dim=25), ["rotary_pct=1.0 of head_dim=25"]),
    (dict(head_dim=24, rotary_pct=0.3), ["rotary_pct=0.3 of head_dim=24"]),
    (dict(softmax_scale="1e-1"), ["softmax_scale='1e-1'"]),
    (dict(softmax_scale=True), ["softmax_scale=True"]),
    (dict(softmax_scale=0), ["softmax_scale=0"]),
    (dict(softmax_scale=float("nan")), ["softmax_scale=nan"]),
    (dict(qk_norm_type="per-head"), ["qk_norm_type='per-head'"]),
    (dict(qk_norm_type="per_head", use_qk_layernorm=True), ["use_qk_layernorm=True"]),
    (dict(head_dim=24, use_mup=True), ["head_dim=24 with use_mup=True"]),
    (dict(softmax_scale=0.1, use_mup=True), ["softmax_scale=0.1 with use_mup=True"]),
    (dict(head_dim=24, attention_config=["gmlp", "gmlp"]), ["head_dim=24: gmlp"]),
    (dict(softmax_scale=0.1, attention_config=["local", "global"]), ["softmax_scale=0.1: local"]),
    (dict(head_dim=24, num_attention_heads=3, model_parallel_size=2), ["num_attention_heads=3"]),
    (dict(head_dim="24", softmax_scale=-1, qk_norm_type="none"), ["head_dim", "softmax_scale", "qk_norm_type"]),
]


@pytest.mark.parametrize("changes, named", REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused(changes, named):
    with pytest.raises(ConfigError) as refusal:
        arguments(**dict(PLAIN, **changes))
    for text in named:
        assert text in str(refusal.value)


def test_without_head_dim_hidden_size_must_divide():
    with pytest.raises(ValueError, match="head_dim"):
        arguments(hidden_size=80, num_attention_heads=6)
    assert arguments(hidden_size=80, num_attention_heads=6, head_dim=24).head_dim == 24


@pytest.mark.parametrize("name, query_width, ffn_width", [("0.6B", 2048, 3072), ("4B", 4096, 9728)])
def test_presets(name, query_width, ffn_width):
    path = os.path.join(ROOT, "configs", "qwen3", f"{name}.yml")
    neox_args = NeoXArgs.from_ymls([path], overwrite_values=dict(global_num_gpus=1))
    assert head_geometry(neox_args).query_hidden_size == query_width
    neox_args.update_values(dict(hidden_size=2, use_cpu_initialization=True, precision="fp32"))
    mlp = ParallelMLP(neox_args, torch.nn.init.zeros_, torch.nn.init.zeros_, multiple_of=neox_args.mlp_multiple_of)
    assert (mlp.linear1.weight.shape[0], mlp.linear2.weight.shape[1]) == (2 * ffn_width, ffn_width)
