"""Where norms stand in a layer, factors and caps around the layers: formulas in fp64, Hugging Face's modules."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from megatron import costs
from megatron.checkpointing.shards import Shards, Split
from megatron.errors import ConfigError
from megatron.model import transformer, transformer_engine
from megatron.model.gpt2_model import build_model, cross_entropy
from megatron.model.transformer import ParallelTransformerLayer
from megatron.model.utils import get_params_for_weight_decay_optimization
from megatron.model.word_embeddings import EmbeddingPipe
from tests.helpers.attention_reference import layer_reference
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import ALL, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import batch, disturb
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

S, B = 9, 2
IN, OUT = ("input_layernorm", "post_attention_layernorm"), ("attention_output_layernorm", "mlp_output_layernorm")
NORMS_OF = {"pre": IN, "sandwich": IN + OUT, "post": OUT}
OPTIONS = {
    "gemma 2": dict(
        norm="rmsnorm",
        norm_placement="sandwich",
        zero_centered_gamma=True,
        activation="geglu_tanh",
        ffn_hidden_size=28,
        no_weight_tying=False,
        embedding_multiplier=3.3,
        attn_logit_softcap=0.7,
        final_logit_softcap=0.9,
        use_bias_in_attn_linear=False,
        sliding_window_width=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "olmo 2": dict(norm="rmsnorm", norm_placement="post", qk_norm_type="full_width", final_logit_softcap=0.9),
    "sandwich layernorm": dict(
        norm_placement="sandwich", pos_emb="learned", embedding_multiplier=0.3, use_bias_in_output_layer=True
    ),
    "post scalenorm": dict(norm_placement="post", norm="scalenorm", qk_norm_type="per_head", add_qkv_bias=False),
    "post, no weights": dict(norm_placement="post", norm="non_parametric_layernorm", no_weight_tying=False),
}


def _normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _layer(**settings):
    """A layer with weights of some size, biases and norms among them, and the same in fp64 by name."""
    args = tiny_args(**settings)
    layer = ParallelTransformerLayer(args, 1)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.add_(_normal(*parameter.shape, seed=number) * spread)
    return args, layer, {name: p.detach().double().clone() for name, p in layer.named_parameters()}


def _norm_formula(x, parameters, name, settings):
    """Layer norm or RMS norm of a name, from its definition."""
    offset = 1 if settings.get("zero_centered_gamma") else 0
    if settings["norm"] == "rmsnorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * (parameters[f"{name}.scale"] + offset)
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    return normed * (parameters[f"{name}.weight"] + offset) + parameters[f"{name}.bias"]


def _layer_formula(x, p, args, settings):
    """One layer from its definition: each norm acts where its parameters exist."""

    def norm(name, values):
        kept = name in NORMS_OF[settings["norm_placement"]]
        return _norm_formula(values, p, name, settings) if kept else values

    attention = {name[len("attention.") :]: w for name, w in p.items() if name.startswith("attention.")}
    geometry = args.head_geometry()
    attended = layer_reference(attention, norm(IN[0], x), geometry, geometry.head_dim**-0.5)
    x = x + norm(OUT[0], attended)
    hidden = torch.einsum("sbh,fh->sbf", norm(IN[1], x), p["mlp.linear1.weight"]) + p["mlp.linear1.bias"]
    widened = hidden.relu()
    return x + norm(OUT[1], torch.einsum("sbf,hf->sbh", widened, p["mlp.linear2.weight"]) + p["mlp.linear2.bias"])


@pytest.mark.parametrize("norm", ("layernorm", "rmsnorm"))
@pytest.mark.parametrize("placement", NORMS_OF)
def test_layer_is_its_formula(placement, norm):
    for geometry in (WIDE_NON_DIVISIBLE, NARROW):
        settings = dict(norm=norm, norm_placement=placement, zero_centered_gamma=geometry is NARROW)
        settings.update(layernorm_epsilon=1e-3, rms_norm_epsilon=1e-3)
        args, layer, parameters = _layer(**geometry, **settings, activation="relu")
        x = _normal(S, B, args.hidden_size, seed=99)
        for tensor in parameters.values():
            tensor.requires_grad_()
        wanted = _layer_formula(x, parameters, args, settings)
        actual = layer(x.float())
        assert_close(actual, wanted, FORWARD, placement)
        upstream = _normal(*wanted.shape, seed=5) / wanted.numel() ** 0.5
        wanted.backward(upstream)
        actual.backward(upstream.float())
        for name, parameter in layer.named_parameters():
            assert_close(parameter.grad, parameters[name].grad, GRADIENT, name)


@pytest.mark.parametrize("placement", NORMS_OF)
def test_norms_that_do_not_act_do_not_exist(placement):
    _, layer, _ = _layer(**NARROW, norm_placement=placement)
    names = {name.split(".")[0] for name in layer.state_dict()} - {"attention", "mlp"}
    assert names == set(NORMS_OF[placement])


def test_dropout_follows_the_norm_of_the_output():
    """Only then are dropped elements of the branch exactly 0, in spite of the norm's bias, and others scaled."""
    _, layer, _ = _layer(**NARROW, norm_placement="post", hidden_dropout=0.4)
    branch, bias = _normal(S, B, 160).float(), _normal(160, seed=1).float()
    norm = layer.attention_output_layernorm
    whole = norm(branch + bias)
    dropped = layer.train()._bias_norm_dropout(branch, bias, norm)
    kept = dropped != 0
    assert 0.4 < kept.float().mean() < 0.8
    assert_close(dropped[kept], whole[kept] / 0.6, FORWARD)
    assert_close(layer.eval()._bias_norm_dropout(branch, bias, norm), whole, FORWARD)


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_are_counted_and_norms_do_not_decay(name):
    for geometry in ALL.values():
        args = tiny_args(**geometry, **OPTIONS[name])
        model = build_model(args)
        assert costs.num_parameters(args) == sum(parameter.numel() for parameter in model.parameters())
    groups = get_params_for_weight_decay_optimization(model, tiny_args(**NARROW, weight_decay=0.1))
    decaying = {id(parameter) for parameter in groups[0]["params"]}
    for key, parameter in model.named_parameters():
        assert (id(parameter) in decaying) == (parameter.dim() == 2), key


@pytest.mark.parametrize("name", OPTIONS)
def test_activation_checkpointing_changes_nothing(name):
    results = []
    for checkpointed in (False, True):
        more = dict(checkpoint_activations=checkpointed, checkpoint_num_layers=1)
        args = tiny_args(**WIDE_NON_DIVISIBLE, **OPTIONS[name], **more)
        model = build_model(args)
        disturb(model, args)
        inputs, targets = batch()
        loss = cross_entropy(args)(model(inputs), targets)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert len(results[0]) > 10
    for plain, recomputed in zip(*results, strict=True):
        assert_close(recomputed, plain, {torch.float32: 1e-6})


@pytest.mark.parametrize("name", OPTIONS)
def test_checkpoints_know_how_each_parameter_is_split(name):
    args = tiny_args(**WIDE_NON_DIVISIBLE, **OPTIONS[name])
    for key, parameter in build_model(args).named_parameters():
        _, index, rest = key.split(".", 2)
        split = Shards(args).split_of(int(index), rest)
        assert split.dim == getattr(parameter, "partition_dim", None) and not split.summed, key


def test_checkpoints_know_norms_by_both_of_their_names():
    """Transformer Engine's norms are one module further in."""
    shards = Shards(tiny_args(**WIDE_NON_DIVISIBLE))
    for name in (*IN, *OUT, "norm"):
        for suffix in ("weight", "bias", "scale", "g", "norm.weight", "norm.bias"):
            assert shards.split_of(2, f"{name}.{suffix}") == Split(), name


# Embedding and output layer


@pytest.mark.parametrize("precision", ("fp32", "bfloat16", "fp16"))
def test_embedding_multiplier_is_hugging_faces(precision):
    """sqrt(3072) is 55.5 in bfloat16. Bit-equal in every precision."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    args = tiny_args(**NARROW, precision=precision, embedding_multiplier=3072**0.5)
    embedding = EmbeddingPipe(args, lambda tensor, generator=None: tensor.normal_())
    theirs = Gemma3TextScaledWordEmbedding(128, 160, None, embed_scale=3072**0.5).to(args.params_dtype)
    theirs.weight.data.copy_(embedding.word_embeddings.weight)
    tokens, _ = batch()[0]
    ours = embedding((tokens, tokens))
    assert ours.dtype == args.params_dtype and torch.equal(ours, theirs(tokens))
    if precision == "bfloat16":
        row = embedding.word_embeddings.weight[tokens[0, 0]]
        assert torch.equal(ours[0, 0], (row.double() * 55.5).bfloat16())


def test_positions_are_added_to_the_scaled_tokens():
    args = tiny_args(**NARROW, pos_emb="learned", embedding_multiplier=7.0)
    embedding = EmbeddingPipe(args, lambda tensor, generator=None: tensor.normal_())
    (tokens, positions), _ = batch()
    words, table = embedding.word_embeddings.weight.double(), embedding.position_embeddings.weight.double()
    assert_close(embedding((tokens, positions)), 7 * words[tokens] + table[positions], FORWARD)


@pytest.mark.parametrize("tied", (False, True))
def test_output_layer_is_capped_and_not_scaled(tied):
    """logits = cap tanh((W x + b) / cap) with the final norm's output x, W the embedding and no b when tied."""
    cap = 0.8
    head = dict(no_weight_tying=not tied, use_bias_in_output_layer=not tied)
    args = tiny_args(**NARROW, **head, embedding_multiplier=5.0, final_logit_softcap=cap)
    model = build_model(args)
    disturb(model, args)
    seen = []
    model.sequential[-2].register_forward_hook(lambda module, inputs, output: seen.append(output.double()))
    logits = model(batch()[0])
    weight = model.sequential[0].word_embeddings.weight if tied else model.sequential[-1].final_linear.weight
    bias = None if tied else model.sequential[-1].final_linear.bias.double()
    raw = F.linear(seen[0], weight.double(), bias)
    assert raw.abs().max() > 3 * cap, "the cap would change nothing"
    assert_close(logits, cap * (raw.exp() ** (2 / cap) - 1) / (raw.exp() ** (2 / cap) + 1), FORWARD)
    model.set_parallel_output(False)
    assert torch.equal(model(batch()[0]), logits)


def test_gradient_of_the_cap():
    """1 - tanh^2, in fp64."""
    x = torch.linspace(-9, 9, 37, dtype=torch.float64, requires_grad=True)
    transformer.soft_cap(x, 2.5).sum().backward()
    with torch.no_grad():
        assert_close(x.grad, 1 / torch.cosh(x / 2.5) ** 2)
    assert transformer.soft_cap(x, None) is x


# Settings that do not fit, and the context of the forward pass


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(norm_placement="sandwich", gpt_j_residual=True), ("norm_placement=sandwich", "gpt_j_residual")),
        (dict(norm_placement="post", gpt_j_residual=True), ("norm_placement=post", "gpt_j_residual")),
        (dict(norm_placement="post", te_layernorm_mlp=True), ("te_layernorm_mlp=True", "norm_placement=post")),
        (dict(norm_placement="after"), ("norm_placement", "after")),
        (dict(use_bias_in_output_layer=True, no_weight_tying=False), ("use_bias_in_output_layer=True",)),
        (dict(final_logit_softcap=0.0), ("final_logit_softcap=0.0",)),
        (dict(embedding_multiplier=-1.0), ("embedding_multiplier=-1.0",)),
    ],
)
def test_refused(settings, words):
    with pytest.raises(ConfigError) as refusal:
        tiny_args(**settings)
    assert any(all(word in problem for word in words) for problem in refusal.value.problems), str(refusal.value)


def test_layer_runs_in_the_fp8_context_only_with_transformer_engine(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def context(neox_args):
        entered.append(neox_args)
        yield
        entered.append("left")

    monkeypatch.setitem(vars(transformer_engine), "fp8_context", context)  # without importing Transformer Engine
    args, layer, _ = _layer(**NARROW)
    x = torch.zeros(S, B, 160)
    layer(x)
    assert not entered
    for name in ("te_mha", "te_fp8_mha", "te_layernorm_mlp", "te_columnparallel", "te_rowparallel"):
        monkeypatch.setattr(args, name, True)
        layer.fp8_context = transformer._fp8_context(args)
        monkeypatch.setattr(args, name, False)
        layer(x)
        layer(x)  # one context each time
        assert entered == [args, "left"] * 2, name
        entered.clear()
