"""Norms on queries and keys, and the QKV bias: Hugging Face's attention modules, and formulas in fp64."""

import pytest
import torch

from megatron import costs
from megatron.errors import ConfigError
from megatron.model.attention import KVCache, ParallelSelfAttention
from megatron.model.attention.core import KERNELS
from megatron.model.gpt2_model import build_model
from megatron.model.utils import get_params_for_weight_decay_optimization
from tests.helpers.attention_reference import layer_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MQA, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

SEQ, BATCH = 9, 2
N, M, D = 6, 2, 24
"""Of WIDE_NON_DIVISIBLE."""
HF_HIDDEN = 78
"""Gemma3TextConfig refuses a hidden size that is no multiple of the heads."""
PLAIN = dict(use_bias_in_attn_linear=False, norm="rmsnorm", rms_norm_epsilon=1e-5)
FAMILIES = {
    "qwen3": dict(PLAIN, qk_norm_type="per_head"),
    "gemma3": dict(PLAIN, qk_norm_type="per_head", zero_centered_gamma=True),
    "olmo2": dict(PLAIN, qk_norm_type="full_width"),
    "olmo2_fused": dict(PLAIN, qk_norm_type="full_width", rmsnorm_fusion=True),
    "qwen3_fused": dict(PLAIN, qk_norm_type="per_head", rmsnorm_fusion=True),
}


def _normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _attention(kind="global", geometry=WIDE_NON_DIVISIBLE, **settings):
    args = tiny_args(**geometry, attention_config=[kind] * 2, **settings)
    torch.manual_seed(0)
    attention = ParallelSelfAttention(args, layer_number=1)
    with torch.no_grad():
        for number, parameter in enumerate(attention.parameters()):
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.add_(_normal(*parameter.shape, seed=number) * spread)
    return args, attention


# Hugging Face


def _hugging_face(family):
    """(attention module, cos and sin), eager."""
    from transformers.models.gemma3 import modeling_gemma3 as gemma3
    from transformers.models.olmo2 import modeling_olmo2 as olmo2
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    numbers = dict(hidden_size=HF_HIDDEN, num_attention_heads=N, num_key_value_heads=M, head_dim=D, rms_norm_eps=1e-5)
    numbers.update(num_hidden_layers=2, max_position_embeddings=32, attn_implementation="eager")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    positions = torch.arange(SEQ).expand(BATCH, -1)
    if family.startswith("gemma3"):
        rope = {"full_attention": rope, "sliding_attention": rope}
        more = dict(query_pre_attn_scalar=D, layer_types=["full_attention"] * 2)
        config = gemma3.Gemma3TextConfig(**numbers, **more, rope_parameters=rope)
        tables = gemma3.Gemma3RotaryEmbedding(config)(torch.zeros(1), positions, "full_attention")
        return gemma3.Gemma3Attention(config, layer_idx=1), tables
    module, name = (qwen3, "Qwen3") if family.startswith("qwen3") else (olmo2, "Olmo2")
    config = getattr(module, f"{name}Config")(**numbers, rope_parameters=rope)
    tables = getattr(module, f"{name}RotaryEmbedding")(config)(torch.zeros(1), positions)
    return getattr(module, f"{name}Attention")(config, layer_idx=1), tables


def _copy_weights(ours, theirs):
    projections = (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    with torch.no_grad():
        for their, rows in zip(projections, ours.query_key_value.weight.split([N * D, M * D, M * D]), strict=True):
            their.weight.copy_(rows)
        theirs.o_proj.weight.copy_(ours.dense.weight)
        theirs.q_norm.weight.copy_(ours.q_layernorm.scale)
        theirs.k_norm.weight.copy_(ours.k_layernorm.scale)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_hugging_face(family, kind):
    """Outputs, and gradients of the input and of every weight, with grouped heads and rotary positions."""
    _, ours = _attention(kind, dict(WIDE_NON_DIVISIBLE, hidden_size=HF_HIDDEN), **FAMILIES[family])
    theirs, tables = _hugging_face(family)
    _copy_weights(ours, theirs)
    hidden, pull = _normal(SEQ, BATCH, HF_HIDDEN, seed=50).float(), _normal(SEQ, BATCH, HF_HIDDEN, seed=51).float()
    given, their_given = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    output, bias = ours(given)
    output.backward(pull)
    mask = torch.full((SEQ, SEQ), -torch.inf).triu(1)[None, None]
    wanted, _ = theirs(their_given.transpose(0, 1), position_embeddings=tables, attention_mask=mask)
    wanted = wanted.transpose(0, 1)
    wanted.backward(pull)

    assert bias is None
    assert_close(output, wanted, FORWARD, "output")
    assert_close(given.grad, their_given.grad, GRADIENT, "input gradient")
    rows = torch.cat([x.weight.grad for x in (theirs.q_proj, theirs.k_proj, theirs.v_proj)])
    assert_close(ours.query_key_value.weight.grad, rows, GRADIENT, "QKV gradient")
    assert_close(ours.q_layernorm.scale.grad, theirs.q_norm.weight.grad, GRADIENT, "q norm gradient")
    assert_close(ours.k_layernorm.scale.grad, theirs.k_norm.weight.grad, GRADIENT, "k norm gradient")


# Formulas


def _truth(x, parameters, settings, args):
    """x [s, b, n, d] normed over each head or over all heads, from the definitions."""
    shape = x.shape
    if settings["qk_norm_type"] == "full_width":
        x = x.reshape(*shape[:2], -1)
    one = 1.0 if settings.get("zero_centered_gamma") else 0.0
    if args.norm == "rmsnorm":
        normed = x / (x.pow(2).mean(-1, keepdim=True) + args.rms_norm_epsilon).sqrt() * (one + parameters["scale"])
    elif args.norm == "scalenorm":
        normed = x / x.pow(2).sum(-1, keepdim=True).sqrt() * parameters["g"]
    else:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.pow(2).mean(-1, keepdim=True) + args.layernorm_epsilon).sqrt()
        if parameters:
            normed = normed * (one + parameters["weight"]) + parameters["bias"]
    return normed.reshape(shape)


NORMS = {
    f"{kind} {norm}{' zero-centred' * zero_centered}": dict(
        qk_norm_type=kind, norm=norm, zero_centered_gamma=zero_centered, **{f"{epsilon}_epsilon": 1e-2}
    )
    for kind in ("per_head", "full_width")
    for norm, epsilon in (
        ("rmsnorm", "rms_norm"),
        ("layernorm", "layernorm"),
        ("non_parametric_layernorm", "layernorm"),
        ("scalenorm", "scalenorm"),
    )
    for zero_centered in (False, True)
    if not (zero_centered and norm in ("non_parametric_layernorm", "scalenorm"))
    if (kind, norm) != ("full_width", "scalenorm")
}


@pytest.mark.parametrize("name", NORMS)
def test_every_kind_equals_its_formula(name):
    settings = NORMS[name]
    args, attention = _attention(**settings)
    given = [_normal(SEQ, BATCH, heads, D, seed=heads) * 0.4 + 0.1 for heads in (N, M)]
    pulls = [_normal(SEQ, BATCH, heads, D, seed=heads + 20) for heads in (N, M)]
    ours = [x.float().requires_grad_() for x in given]
    truth = [x.clone().requires_grad_() for x in given]
    got, norms = attention._normalise(*ours), (attention.q_layernorm, attention.k_layernorm)
    for x, wide, pull, y, norm in zip(ours, truth, pulls, got, norms, strict=True):
        parameters = {key: p.detach().double().requires_grad_() for key, p in norm.named_parameters()}
        wanted = _truth(wide, parameters, settings, args)
        y.backward(pull.float())
        wanted.backward(pull)
        assert_close(y, wanted, FORWARD, "output")
        assert_close(x.grad, wide.grad, GRADIENT, "input gradient")
        for key, parameter in norm.named_parameters():
            assert_close(parameter.grad, parameters[key].grad, GRADIENT, key)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", NORMS)
def test_half_precision(name, dtype):
    """300 squared is beyond fp16, and a sum over 144 of them too."""
    settings = NORMS[name]
    args, attention = _attention(**settings)
    attention = attention.to(dtype)
    for size in (1.0, 300.0):
        q = (_normal(SEQ, BATCH, N, D) * size).to(dtype)
        normed, _ = attention._normalise(q, q[:, :, :M])
        parameters = {key: p.detach().double() for key, p in attention.q_layernorm.named_parameters()}
        assert normed.dtype == dtype
        assert_close(normed, _truth(q.double(), parameters, settings, args).to(dtype), FORWARD)


@pytest.mark.parametrize(
    "settings, independent",
    [
        (dict(qk_norm_type="per_head", norm="rmsnorm"), True),
        (dict(qk_norm_type="per_head", norm="layernorm"), True),
        (dict(qk_norm_type="full_width", norm="rmsnorm"), False),
        (dict(qk_norm_type="full_width", norm="layernorm"), False),
        (dict(qk_norm_type="joint", norm="rmsnorm"), True),
        (dict(qk_norm_type="joint", norm="layernorm"), False),
    ],
    ids=str,
)
def test_which_heads_a_head_depends_on(settings, independent):
    _, attention = _attention(**settings)
    q, k = _normal(SEQ, BATCH, N, D).float(), _normal(SEQ, BATCH, M, D, seed=1).float()
    before = attention._normalise(q, k)
    for which, heads, repeats in ((0, N, 1), (1, M, N // M if settings["qk_norm_type"] == "joint" else 1)):
        for j in range(heads):
            disturbed = [x.clone() for x in (q, k)]
            disturbed[which][:, :, j] += 1.0
            after = attention._normalise(*disturbed)
            own = torch.zeros(heads, dtype=torch.bool)
            own[j] = True
            own = own.repeat_interleave(repeats)
            assert not torch.equal(after[which][:, :, own], before[which][:, :, own])
            assert torch.equal(after[which][:, :, ~own], before[which][:, :, ~own]) == independent
            assert torch.equal(after[1 - which], before[1 - which])  # queries and keys know nothing of each other


def test_per_head_weights_serve_all_heads_and_full_width_ones_a_single_head():
    for kind, width in (("per_head", D), ("full_width", None)):
        _, attention = _attention(qk_norm_type=kind, norm="rmsnorm")
        shapes = {name: tuple(p.shape) for name, p in attention.named_parameters() if "norm" in name}
        assert shapes == {"q_layernorm.scale": (width or N * D,), "k_layernorm.scale": (width or M * D,)}
        q, k = _normal(SEQ, BATCH, N, D).float(), _normal(SEQ, BATCH, M, D).float()
        before = attention._normalise(q, k)
        with torch.no_grad():
            attention.q_layernorm.scale[3] += 1.0
        after, keys = attention._normalise(q, k)
        changed = (after != before[0]).flatten(0, 1).any(0)  # [n, d]
        wanted = torch.zeros(N, D, dtype=torch.bool)
        wanted[slice(None) if kind == "per_head" else 0, 3] = True
        assert torch.equal(changed, wanted) and torch.equal(keys, before[1])


# Counts, groups, initial values, refusals


@pytest.mark.parametrize("geometry", (WIDE_NON_DIVISIBLE, NARROW, MQA), ids=("wide", "narrow", "mqa"))
def test_counts_and_weight_decay_groups(geometry):
    for name, settings in {**NORMS, "joint": dict(qk_norm_type="joint")}.items():
        for bias in (dict(use_bias_in_attn_linear=True), dict(use_bias_in_attn_linear=False, add_qkv_bias=True)):
            args = tiny_args(**geometry, **settings, **bias, weight_decay=0.1)
            model = build_model(args)
            assert costs.num_parameters(args) == sum(p.numel() for p in model.parameters()), (name, bias)
            exempt = {id(p) for p in get_params_for_weight_decay_optimization(model, args)[1]["params"]}
            for key, parameter in model.named_parameters():
                assert (id(parameter) in exempt) == ("norm" in key or key.endswith("bias")), key


def test_new_norms_multiply_by_one():
    for zero_centered in (False, True):
        args = tiny_args(**WIDE_NON_DIVISIBLE, qk_norm_type="per_head", zero_centered_gamma=zero_centered)
        scales = {name: p for name, p in build_model(args).named_parameters() if name.endswith("norm.weight")}
        assert len(scales) == 2 * 4 + 1  # of two layers and at the end
        for name, scale in scales.items():
            assert torch.equal(scale, torch.full_like(scale, 0.0 if zero_centered else 1.0)), name


def test_joint_is_use_qk_layernorm():
    first, second = (
        _attention(**choice)[1](_normal(SEQ, BATCH, 80).float())[0]
        for choice in (dict(use_qk_layernorm=True), dict(qk_norm_type="joint"))
    )
    assert torch.equal(first, second)


def test_what_has_no_form_over_all_heads_is_refused():
    with pytest.raises(ConfigError, match="qk_norm_type=full_width.*norm=scalenorm"):
        tiny_args(**WIDE_NON_DIVISIBLE, qk_norm_type="full_width", norm="scalenorm")


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("qk_norm", ("per_head", "full_width"))
def test_the_cache_holds_the_kv_heads_only(qk_norm, kind):
    args, attention = _attention(kind, qk_norm_type=qk_norm, norm="rmsnorm")
    cache = KVCache(args, [1], BATCH, SEQ)
    assert cache.nbytes == 2 * M * D * 4 * BATCH * SEQ
    hidden = _normal(SEQ, BATCH, 80).float()
    with torch.no_grad():
        whole, bias = attention(hidden)
        parts = [attention(part, cache[1])[0] for part in hidden.split([4, 1, 1, 3])]
    assert_close(torch.cat(parts), whole, FORWARD)


# QKV bias alone


@pytest.mark.parametrize("kind", KERNELS)
def test_a_bias_on_qkv_only(kind):
    args, attention = _attention(kind, use_bias_in_attn_linear=False, add_qkv_bias=True)
    names = [name for name, _ in attention.named_parameters()]
    assert names == ["query_key_value.weight", "query_key_value.bias", "dense.weight"]
    assert attention.query_key_value.bias.abs().min() > 0
    hidden = _normal(SEQ, BATCH, 80)
    output, bias = attention(hidden.float())
    parameters = {name: p.detach().double() for name, p in attention.named_parameters()}
    parameters["dense.bias"] = torch.zeros(80, dtype=torch.float64)
    assert bias is None
    assert_close(output, layer_reference(parameters, hidden, args.head_geometry(1), scale=D**-0.5), FORWARD)


def test_the_bias_cannot_be_asked_for_twice():
    with pytest.raises(ConfigError, match="add_qkv_bias=True.*use_bias_in_attn_linear=True"):
        tiny_args(**WIDE_NON_DIVISIBLE, add_qkv_bias=True, use_bias_in_attn_linear=True)
