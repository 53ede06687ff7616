"""Cached greedy generation of the real model against an argmax loop over its plain forward, for every kind of
position embedding, geometry, kernel and norm of the heads."""

from types import SimpleNamespace

import pytest
import torch

from megatron.costs import kv_cache_bytes_per_token
from megatron.model.gpt2_model import build_model
from megatron.text_generation import InferenceRunner, generate_samples_from_prompt, stream_tokens
from tests.helpers import geometries
from tests.helpers.configs import tiny_args

SEQ_LENGTH, VOCABULARY = 24, 120
PROMPTS = [[17, 5, 99], [3, 3, 64, 21, 8, 110, 2], [77]]
NO_EOS = -1

POSITIONS = {
    "rotary": dict(pos_emb="rotary"),
    "rotary_quarter": dict(pos_emb="rotary", rotary_pct=0.25),
    "learned": dict(pos_emb="learned"),
    "sinusoidal": dict(pos_emb="sinusoidal"),
    "alibi": dict(pos_emb="alibi"),
    "rpe": dict(pos_emb="rpe", rpe_num_buckets=8, rpe_max_distance=12),
    "none": dict(pos_emb="none"),
}
EXTRAS = {
    "joint_qk_layernorm": dict(pos_emb="rotary", use_qk_layernorm=True),
    "qk_rmsnorm": dict(pos_emb="rotary", use_qk_layernorm=True, norm="rmsnorm"),
    "window": dict(pos_emb="rotary", sliding_window_width=4),
    "flash": dict(pos_emb="rotary", attention_config=[[["flash"], "all"]]),
    "flash_window": dict(pos_emb="learned", attention_config=[[["flash"], "all"]], sliding_window_width=4),
    "flash_qk_layernorm": dict(pos_emb="none", attention_config=[[["flash"], "all"]], use_qk_layernorm=True),
    "swiglu_rmsnorm_tied": dict(pos_emb="rotary", activation="swiglu", norm="rmsnorm", no_weight_tying=False),
    "gpt_j_residual": dict(pos_emb="rotary", gpt_j_residual=True, rotary_pct=0.5),
}
QUARTER_IS_ODD = "mqa"  # a quarter of head_dim 12 is 3 dimensions


def generation_args(**settings):
    """Weights wide enough that no two tokens are nearly as likely."""
    settings = {
        **dict(seq_length=SEQ_LENGTH, max_position_embeddings=SEQ_LENGTH, init_method_std=0.3),
        **dict(init_method="normal", output_layer_init_method="normal"),
        **settings,
    }
    neox_args = tiny_args(**settings)
    neox_args.tokenizer = SimpleNamespace(
        eod=0,
        vocab_size=VOCABULARY,
        tokenize=lambda text: [int(token) for token in text.split()],
        detokenize=lambda tokens: " ".join(map(str, tokens)),
    )
    return neox_args


def greedy_by_full_forward(model, prompt, end):
    """Tokens of prompt and continuation up to `end`, by the model's own forward over the whole sequence."""
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < end:
            ids = torch.tensor([tokens])
            logits = model((ids, torch.arange(len(tokens)).unsqueeze(0)))
            tokens.append(int(logits[0, -1, :VOCABULARY].argmax()))
    return tokens


def generate(neox_args, model, prompts, **options):
    *_, state = stream_tokens(neox_args, model, prompts, eos_token_id=NO_EOS, **options)
    return state


def check_cached_equals_full_forward(settings):
    neox_args = generation_args(**settings)
    model = build_model(neox_args).eval()
    end = 1 + 18
    cached = generate(neox_args, model, PROMPTS, maximum_tokens=18)
    recomputed = generate(neox_args, model, PROMPTS, maximum_tokens=18, recompute=True)
    expected = [greedy_by_full_forward(model, prompt, end) for prompt in PROMPTS]
    assert cached.tokens[:, :end].tolist() == expected
    assert recomputed.tokens[:, :end].tolist() == expected
    assert len({token for row in expected for token in row[-10:]}) > 4, "the model repeats itself: a weak test"


@pytest.mark.parametrize("geometry", ["wide_non_divisible", "narrow", "mha", "mqa"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_every_position_embedding(positions, geometry):
    if positions == "rotary_quarter" and geometry == QUARTER_IS_ODD:
        geometry = "quotient"
    check_cached_equals_full_forward({**geometries.ALL[geometry], **POSITIONS[positions]})


@pytest.mark.parametrize("geometry", ["wide_non_divisible", "mha", "mqa"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_kernel_and_norm(extra, geometry):
    check_cached_equals_full_forward({**geometries.ALL[geometry], **EXTRAS[extra]})


@pytest.mark.parametrize("geometry", ["wide_non_divisible", "mqa"])
def test_rows_and_prompts_in_a_row_give_what_each_gives_alone(geometry):
    neox_args = generation_args(**geometries.ALL[geometry], pos_emb="rotary")
    runner = InferenceRunner(neox_args, build_model(neox_args))
    texts = [" ".join(map(str, prompt)) for prompt in PROMPTS]
    together = generate_samples_from_prompt(neox_args, runner, texts, eos_token_id=NO_EOS, maximum_tokens=9)
    for text, record in zip(reversed(texts), reversed(together), strict=True):
        alone = generate_samples_from_prompt(neox_args, runner, text, eos_token_id=NO_EOS, maximum_tokens=9)
        assert alone[0]["text"] == record["text"]


def test_generation_to_the_context_length_and_logits():
    neox_args = generation_args(**geometries.WIDE_NON_DIVISIBLE, pos_emb="learned", return_logits=True)
    model = build_model(neox_args).eval()
    state = generate(neox_args, model, PROMPTS[:1])
    tokens = state.tokens[0]
    assert state.end_index.tolist() == [SEQ_LENGTH - 1]
    with torch.no_grad():
        full = model((tokens.unsqueeze(0), torch.arange(SEQ_LENGTH).unsqueeze(0)))[0, len(PROMPTS[0]) - 1 : -1]
    torch.testing.assert_close(state.logits[:, 0], full[:, :VOCABULARY], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("geometry", ["wide_non_divisible", "narrow", "mha", "mqa"])
def test_cache_has_the_size_the_geometry_gives(geometry):
    neox_args = generation_args(**geometries.ALL[geometry], pos_emb="rotary")
    runner = InferenceRunner(neox_args, build_model(neox_args))
    generate(neox_args, runner, PROMPTS[:1], maximum_tokens=8)
    tokens = len(PROMPTS[0]) + 8 - 1
    widths = neox_args.head_geometry()
    assert runner.cache_bytes == tokens * neox_args.num_layers * 2 * widths.num_kv_heads * widths.head_dim * 4
    assert runner.cache_bytes == tokens * kv_cache_bytes_per_token(neox_args)


def test_cache_is_kept_and_emptied_between_prompts():
    neox_args = generation_args(**geometries.MHA, pos_emb="rotary")
    runner = InferenceRunner(neox_args, build_model(neox_args))
    generate(neox_args, runner, PROMPTS[1:2], maximum_tokens=8)
    cache = runner.cache
    generate(neox_args, runner, PROMPTS[:1], maximum_tokens=8)
    assert runner.cache is cache and cache.length == len(PROMPTS[0]) + 8 - 1
    generate(neox_args, runner, PROMPTS[1:2], maximum_tokens=9)
    assert runner.cache is not cache, "a longer text needs more room"
    cache = runner.cache
    generate(neox_args, runner, PROMPTS, maximum_tokens=8)
    assert runner.cache is not cache, "another batch size needs another cache"
    generate(neox_args, runner, PROMPTS, maximum_tokens=8, recompute=True)
    assert runner.cache is None and runner.cache_bytes == 0


def test_dropout_is_off():
    neox_args = generation_args(**geometries.MHA, pos_emb="rotary", hidden_dropout=0.5, attention_dropout=0.5)
    model = build_model(neox_args).train()
    first, second = (generate(neox_args, model, PROMPTS, maximum_tokens=9).tokens for _ in range(2))
    assert torch.equal(first, second)
