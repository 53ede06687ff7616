"""The step that generates one token: against the layers' own forward passes, and its parts against fp64."""

import pytest
import torch

from megatron.model import decoding
from megatron.model.attention.cache_formats import _float8_values, cache_format
from megatron.model.attention.core import decode
from megatron.model.few_rows import MOST_ROWS, linear
from megatron.model.gpt2_model import build_model
from megatron.text_generation import InferenceRunner
from tests.helpers import geometries
from tests.helpers.configs import tiny_args
from tests.helpers.tolerances import FORWARD, assert_close

PROMPT, STEPS = 5, 6
LENGTH = PROMPT + STEPS
LLAMA3 = dict(type="llama3", factor=4.0, original_max_position_embeddings=8, low_freq_factor=1.0, high_freq_factor=4.0)
DYNAMIC = dict(type="dynamic", factor=2.0, original_max_position_embeddings=8)

SMALL = dict(init_method_std=0.05)
"""For half precision: logits of order one, as the tolerances want them."""

GROUPS = [[24, 2], {"layer": 1, "groups": [[16, 3], [40, 3, 3]]}]

OPTIONS = {
    "rotary": dict(),
    "quarter": dict(rotary_pct=0.25, **geometries.QUOTIENT),
    "learned": dict(pos_emb="learned"),
    "sinusoidal": dict(pos_emb="sinusoidal"),
    "none": dict(pos_emb="none"),
    "mha": geometries.MHA,
    "mqa": geometries.MQA,
    "widths": dict(geometries.WIDE_NON_DIVISIBLE, head_dim=[24, 40], num_kv_heads=[6, 2]),
    "groups": dict(geometries.WIDE_NON_DIVISIBLE, head_dim=GROUPS, qk_norm_type="per_head", sliding_window_width=4),
    "groups_joint": dict(geometries.WIDE_NON_DIVISIBLE, head_dim=GROUPS, use_qk_layernorm=True, kv_cache_dtype="int8"),
    "joint": dict(use_qk_layernorm=True),
    "per_head": dict(qk_norm_type="per_head", norm="rmsnorm"),
    "full": dict(qk_norm_type="full_width", norm="rmsnorm", norm_placement="post"),
    "window": dict(sliding_window_width=3),
    "window_and_full": dict(
        sliding_window_width=4,
        layer_types=["sliding_attention", "full_attention"],
        rotary_emb_base={"sliding_attention": 1000.0, "full_attention": 50000.0},
    ),
    "softcaps": dict(attn_logit_softcap=2.0, final_logit_softcap=3.0, norm="rmsnorm", norm_placement="sandwich"),
    "scale": dict(softmax_scale=0.6, apply_query_key_layer_scaling=True, precision="fp16", **SMALL),
    "residual": dict(gpt_j_residual=True),
    "residual_tied": dict(gpt_j_residual=True, gpt_j_tied=True),
    "biases_and_gate": dict(activation="swiglu", use_bias_in_output_layer=True),
    "no_biases": dict(use_bias_in_attn_linear=False, use_bias_in_mlp=False, norm="scalenorm"),
    "tied": dict(no_weight_tying=False, final_logit_softcap=3.0, embedding_multiplier=2.0),
    "no_rope": dict(no_rope_layers=[0, 1]),
    "gemma4": dict(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window_width=4,
        head_dim=[24, 40],
        num_kv_heads=[2, 1],
        shared_key_value={"full_attention": True},
        v_norm=True,
        layer_scalar=True,
        softmax_scale=1.0,
        norm="rmsnorm",
        qk_norm_type="per_head",
        norm_placement="sandwich",
        rope_scaling={"full_attention": dict(rope_type="proportional", partial_rotary_factor=0.25)},
    ),
    "keys_are_values": dict(geometries.MHA, shared_key_value=True, layer_scalar=True, gpt_j_residual=True),
    "int8": dict(kv_cache_dtype="int8"),
    "fp8_window": dict(kv_cache_dtype="fp8_e4m3", sliding_window_width=3),
    "llama3": dict(rope_scaling=LLAMA3),
    "dynamic": dict(rope_scaling=DYNAMIC),
    "stretched": dict(rotary_denominator_scale=1.5),
    "lora": dict(lora=dict(rank=3, dropout=0.5, targets=["query_key_value", "dense", "linear1", "linear2"])),
    "bf16": dict(precision="bfloat16", norm="rmsnorm", activation="geglu", **SMALL),
    "dropout": dict(hidden_dropout=0.5, attention_dropout=0.5),
}


def model_and_args(**settings):
    """Weights wide enough for every part to matter."""
    settings = {
        **(geometries.WIDE_NON_DIVISIBLE if "hidden_size" not in settings else {}),
        **dict(init_method="normal", init_method_std=0.2, output_layer_init_method="normal"),
        **settings,
    }
    args = tiny_args(**settings)
    model = build_model(args).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        scalars = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
        for parameter in (*model.parameters(), *scalars):  # biases start at 0, scales at 1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.03)
    return model, args


def logits_of_steps(args, model, tokens, use_step=True):
    """[steps, b, v]: what predicts each token after the prompt, the same tokens fed whatever the logits say."""
    runner = InferenceRunner(args, model)
    if not use_step:
        runner._step = None
    runner.start(len(tokens), tokens.shape[1])
    logits = [runner.next_token_logits(tokens[:, :PROMPT], positions(0, PROMPT, tokens))]
    for index in range(PROMPT, tokens.shape[1]):
        logits.append(runner.next_token_logits(tokens[:, index : index + 1], positions(index, index + 1, tokens)))
    return torch.stack(logits)


def positions(start, end, tokens):
    return torch.arange(start, end).expand(len(tokens), -1)


def some_tokens(batch, length=LENGTH):
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("option", OPTIONS)
def test_the_step_computes_what_the_layers_compute(option, monkeypatch):
    model, args = model_and_args(**OPTIONS[option])
    steps = counted_steps(monkeypatch)
    for batch in (1, 3, MOST_ROWS + 1):
        tokens = some_tokens(batch)
        expected = logits_of_steps(args, model, tokens, use_step=False)
        assert not steps
        assert_close(logits_of_steps(args, model, tokens), expected, tolerance_of(args), f"{option}, {batch} rows")
        assert len(steps) == STEPS
        steps.clear()


def tolerance_of(args):
    """An 8-bit cache can round what is the same up to fp32's last digit to two neighbouring steps."""
    return FORWARD if args.kv_cache_dtype is None else {**FORWARD, torch.float32: FORWARD[torch.bfloat16]}


def counted_steps(monkeypatch):
    steps, run = [], decoding.DecodingStep.__call__
    monkeypatch.setattr(decoding.DecodingStep, "__call__", lambda *args: (steps.append(1), run(*args))[1])
    return steps


@pytest.mark.parametrize("settings", [dict(pos_emb="alibi"), dict(pos_emb="rpe")], ids=str)
def test_biases_of_scores_are_left_to_the_layers(settings, monkeypatch):
    model, args = model_and_args(**settings)
    assert settings["pos_emb"] in decoding.refusal(args)
    assert InferenceRunner(args, model)._step is None


def test_hooks_see_every_token(monkeypatch):
    model, args = model_and_args()
    steps, seen = counted_steps(monkeypatch), []
    hook = model.local_layers()[3][1].mlp.register_forward_hook(lambda *_: seen.append(1))
    logits = logits_of_steps(args, model, some_tokens(2))
    assert len(seen) == 1 + STEPS and not steps
    hook.remove()
    assert_close(logits_of_steps(args, model, some_tokens(2)), logits)
    assert len(steps) == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS, MOST_ROWS + 1])
def test_linear_of_few_rows(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    for outputs in (1, 6, 37):
        x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((1, rows, 40), (outputs,)))
        weight = torch.randn(outputs, 40, generator=generator).div(8).to(dtype)
        expected = torch.einsum("sbi,oi->sbo", x.double(), weight.double())
        for actual, wanted in ((linear(x, weight), expected), (linear(x, weight, bias), expected + bias.double())):
            assert actual.dtype is dtype
            assert_close(actual, wanted.to(dtype), what=f"{outputs} outputs")
    assert torch._C._get_mkldnn_enabled(), "oneDNN stays on for everything else"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "softcap", "key_heads"),
    [
        *((form, cap, heads) for form in (decode._products, decode._sums) for cap in (None, 1.5) for heads in (2, 6)),
        (decode._fused, None, 2),
    ],
)
def test_attention_of_one_token(form, softcap, key_heads, dtype):
    generator = torch.Generator().manual_seed(key_heads)
    tokens, batch, heads, value_heads, width = 9, 3, 6, 2, 10
    q, k, v = (
        torch.randn(n, batch, m, width, generator=generator).to(dtype)
        for n, m in ((1, heads), (tokens, key_heads), (tokens, value_heads))
    )
    keys, values = (x.double().repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bnd,tbnd->bnt", q[0].double(), keys) * 0.7
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected = torch.einsum("bnt,tbnd->bnd", scores.softmax(-1), values)
    assert_close(form(q, k, v, 0.7, softcap).view(batch, heads, width), expected.to(dtype))


def greedy(args, model, prompt, steps, use_step=True):
    """Tokens [b, steps] after prompt [b, s]."""
    runner = InferenceRunner(args, model)
    if not use_step:
        runner._step = None
    return continued(runner, prompt, steps)


def continued(runner, prompt, steps):
    runner.start(len(prompt), prompt.shape[1] + steps)
    fed, chosen = prompt, []
    for _ in range(steps):
        end = prompt.shape[1] + len(chosen)
        logits = runner.next_token_logits(fed, positions(end - fed.shape[1], end, prompt))
        chosen.append(logits.argmax(-1))
        fed = chosen[-1].unsqueeze(1)
    return torch.stack(chosen, 1)


def test_compiled_steps_generate_the_same_tokens_with_one_compilation_of_each_kind():
    settings = dict(
        **dict(sliding_window_width=4, layer_types=["sliding_attention", "full_attention"] * 2, num_layers=4),
        **dict(attn_logit_softcap=5.0, qk_norm_type="per_head", norm="rmsnorm", activation="swiglu"),
        **{**geometries.WIDE_NON_DIVISIBLE, "head_dim": [[24, "all"], {**GROUPS[1], "layer": [1, 3]}]},
        **dict(shared_key_value={"full_attention": True}, v_norm=True, layer_scalar=True),
        lora=dict(rank=3, alpha=30.0, targets=["query_key_value", "linear2"]),
    )
    model, args = model_and_args(**settings)
    runner = InferenceRunner(args.update(compile=True), model)
    expected = {steps: greedy(args, model, some_tokens(2, 3), steps, use_step=False) for steps in (9, 20)}
    assert len(expected[20].unique()) > 10, "the model repeats itself: a weak test"
    torch._dynamo.utils.counters.clear()
    for steps in expected:
        assert torch.equal(continued(runner, some_tokens(2, 3), steps), expected[steps])
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled == 3, "two kinds of layers and the head, for every token and length"


def test_compiled_bf16_with_an_int8_cache_at_several_batch_sizes():
    model, args = model_and_args(precision="bfloat16", kv_cache_dtype="int8", num_layers=1, **SMALL)
    fast = args.update(compile=True)
    for batch in (1, MOST_ROWS, MOST_ROWS + 1):
        tokens = some_tokens(batch)
        expected = logits_of_steps(args, model, tokens, use_step=False)
        assert_close(logits_of_steps(fast, model, tokens), expected, tolerance_of(args), f"{batch} rows")


def test_every_8_bit_float_has_its_value():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 2, 4, 16)
    expected = codes.float()
    assert expected.isnan().sum() == 2
    by_table = cache_format("fp8_e4m3", torch.float32).decode((codes,))
    for values in (by_table, _float8_values(codes)):
        assert torch.equal(values.view(torch.int32)[~expected.isnan()], expected.view(torch.int32)[~expected.isnan()])
        assert torch.equal(values.isnan(), expected.isnan())
