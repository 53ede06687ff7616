"""Our tiny models equal Hugging Face's in logits, gradients included, from the same random weights.

The weights are mapped here by hand, per head and without the code under test's split and pack functions.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.model.gpt2_model import GPT2ModelSequential, cross_entropy
from tests.helpers.configs import tiny_args
from tests.helpers.tolerances import FORWARD, GRADIENT, LOSS, assert_close

VOCAB, SEQ, FFN = 128, 21, 72


def _randomise(model):
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = 0.5 if "norm" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(noise * spread + (1.0 if name.endswith("norm.weight") else 0.0))
    return model.eval()


def _interleave(q, k, v, head_dim):
    """GPT-NeoX MHA rows: q, k, v of each head in turn."""
    blocks = zip(q.split(head_dim), k.split(head_dim), v.split(head_dim), strict=True)
    return torch.cat([row for block in blocks for row in block])


def _llama_layer(theirs, head_dim, grouped):
    """{our name: tensor} of one Llama or Qwen3 layer, for weights and (with the same code) for gradients."""
    a, mlp = theirs["self_attn"], theirs["mlp"]
    result = {
        "input_layernorm.scale": theirs["input_layernorm"]["weight"],
        "post_attention_layernorm.scale": theirs["post_attention_layernorm"]["weight"],
        "mlp.linear1.weight": torch.cat([mlp["up_proj"]["weight"], mlp["gate_proj"]["weight"]]),
        "mlp.linear2.weight": mlp["down_proj"]["weight"],
        "attention.dense.weight": a["o_proj"]["weight"],
    }
    if "bias" in a["o_proj"]:
        result["attention.dense.bias"] = a["o_proj"]["bias"]
    for kind in a["q_proj"]:
        parts = [a[name][kind] for name in ("q_proj", "k_proj", "v_proj")]
        result[f"attention.query_key_value.{kind}"] = torch.cat(parts) if grouped else _interleave(*parts, head_dim)
    return result


def _neox_layer(theirs):
    """Hugging Face's GPT-NeoX keeps the fused weight in GPT-NeoX's own row order."""
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "attention.query_key_value": "attention.query_key_value",
        "attention.dense": "attention.dense",
        "mlp.dense_h_to_4h": "mlp.linear1",
        "mlp.dense_4h_to_h": "mlp.linear2",
    }
    result = {}
    for source, target in names.items():
        module = theirs
        for part in source.split("."):
            module = module[part]
        result.update({f"{target}.{kind}": tensor for kind, tensor in module.items()})
    return result


def _tree(named):
    tree = {}
    for name, tensor in named:
        *path, leaf = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[leaf] = tensor
    return tree


def _compare(hf, args, ours_of, sum_over_heads=None):
    """ours_of(tree of tensors) -> {our full name: tensor}. Logits, loss and all gradients must agree.

    sum_over_heads: ending of the name of a parameter with a row per head where theirs has one row for all.
    """
    model = GPT2ModelSequential(args)
    weights = ours_of(_tree((name, p.detach()) for name, p in hf.named_parameters()))
    model.load_state_dict(weights, strict=True)
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(7))
    labels = tokens.roll(-1, 1)

    theirs = hf(input_ids=tokens).logits
    their_loss = F.cross_entropy(theirs.flatten(0, 1), labels.flatten())
    their_loss.backward()
    logits = model((tokens, torch.arange(SEQ).expand(2, -1)))
    loss = cross_entropy(args)(logits, (labels, torch.ones(2, SEQ)))
    loss.backward()

    assert theirs.abs().max() > 1, "the comparison would see nothing"
    assert_close(logits, theirs, FORWARD, "logits")
    assert abs(loss.item() - their_loss.item()) <= LOSS
    wanted = ours_of(_tree((name, p.grad) for name, p in hf.named_parameters()))
    for name, parameter in model.named_parameters():
        if sum_over_heads and name.endswith(sum_over_heads):
            assert_close(parameter.grad.sum(0), wanted[name][0], GRADIENT, name)
        else:
            assert_close(parameter.grad, wanted[name], GRADIENT, name)


def _llama_names(args, grouped):
    def ours_of(tree):
        result = {
            "sequential.0.word_embeddings.weight": tree["model"]["embed_tokens"]["weight"],
            "sequential.5.norm.scale": tree["model"]["norm"]["weight"],
            "sequential.6.final_linear.weight": tree["lm_head"]["weight"],
        }
        for number, layer in tree["model"]["layers"].items():
            mapped = _llama_layer(layer, args.head_geometry().head_dim, grouped)
            result.update({f"sequential.{int(number) + 2}.{name}": tensor for name, tensor in mapped.items()})
        return result

    return ours_of


def _llama_args(numbers, kind, **more):
    return tiny_args(
        **numbers,
        norm="rmsnorm",
        rms_norm_epsilon=1e-5,
        activation="swiglu",
        ffn_hidden_size=FFN,
        use_bias_in_mlp=False,
        attention_config=[kind] * 2,
        rotary_emb_base=5000,
        **more,
    )


LLAMAS = {
    "mha_with_bias": (dict(hidden_size=64, num_attention_heads=4), True),
    "gqa": (dict(hidden_size=64, num_attention_heads=4, num_kv_heads=2), False),
    "wide_gqa_with_bias": (dict(hidden_size=64, num_attention_heads=4, num_kv_heads=2, head_dim=24), True),
    "narrow_mha": (dict(hidden_size=72, num_attention_heads=6, head_dim=10), False),
    "mqa": (dict(hidden_size=40, num_attention_heads=5, num_kv_heads=1, head_dim=12), False),
}


@pytest.mark.parametrize("kind", ("global", "flash"))
@pytest.mark.parametrize("name", LLAMAS)
def test_llama(name, kind):
    from transformers import LlamaConfig, LlamaForCausalLM

    numbers, bias = LLAMAS[name]
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=numbers["hidden_size"],
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=numbers["num_attention_heads"],
        num_key_value_heads=numbers.get("num_kv_heads", numbers["num_attention_heads"]),
        head_dim=numbers.get("head_dim", numbers["hidden_size"] // numbers["num_attention_heads"]),
        attention_bias=bias,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    args = _llama_args(numbers, kind, use_bias_in_attn_linear=bias)
    grouped = config.num_key_value_heads < config.num_attention_heads
    _compare(_randomise(LlamaForCausalLM(config)), args, _llama_names(args, grouped))


@pytest.mark.parametrize("kind", ("global", "flash"))
@pytest.mark.parametrize("kv_heads", (6, 2))
def test_qwen3_as_far_as_gpt_neox_has_it(kv_heads, kind):
    """Qwen3 normalises q and k by [head_dim]; GPT-NeoX has one scale [heads, head_dim] for both. They meet where
    Qwen3's two scales are equal, and ours is the same for all heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    numbers = dict(hidden_size=80, num_attention_heads=6, num_kv_heads=kv_heads, head_dim=24)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=80,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        head_dim=24,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    hf = _randomise(Qwen3ForCausalLM(config))
    for layer in hf.model.layers:
        layer.self_attn.k_norm.weight = layer.self_attn.q_norm.weight  # one parameter: its gradient is the sum
    args = _llama_args(numbers, kind, use_bias_in_attn_linear=False, use_qk_layernorm=True)
    llama_names = _llama_names(args, grouped=kv_heads < 6)

    def ours_of(tree):
        result = llama_names(tree)
        for number, layer in tree["model"]["layers"].items():
            scale = layer["self_attn"]["q_norm"]["weight"]
            result[f"sequential.{int(number) + 2}.attention.qk_layernorm.scale"] = scale.expand(6, 24)
        return result

    _compare(hf, args, ours_of, sum_over_heads="qk_layernorm.scale")


def _neox_names(tree):
    result = {
        "sequential.0.word_embeddings.weight": tree["gpt_neox"]["embed_in"]["weight"],
        "sequential.5.norm.weight": tree["gpt_neox"]["final_layer_norm"]["weight"],
        "sequential.5.norm.bias": tree["gpt_neox"]["final_layer_norm"]["bias"],
        "sequential.6.final_linear.weight": tree.get("lm_head", tree.get("embed_out"))["weight"],
    }
    for number, layer in tree["gpt_neox"]["layers"].items():
        result.update({f"sequential.{int(number) + 2}.{name}": tensor for name, tensor in _neox_layer(layer).items()})
    return result


@pytest.mark.parametrize("kind", ("global", "flash"))
@pytest.mark.parametrize("parallel_residual", (True, False))
@pytest.mark.parametrize("activation", ("gelu", "gelu_fast"))
def test_gpt_neox(parallel_residual, activation, kind):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act=activation,
        use_parallel_residual=parallel_residual,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    args = tiny_args(
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=FFN,
        rotary_pct=0.25,
        rotary_emb_base=5000,
        gpt_j_residual=parallel_residual,
        bias_gelu_fusion=activation == "gelu_fast",
        attention_config=[kind] * 2,
    )
    _compare(_randomise(GPTNeoXForCausalLM(config)), args, _neox_names)
