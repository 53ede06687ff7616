"""Generation with prompts fed in pieces, windows in the cache and 8-bit caches: same tokens, promised memory."""

import pytest
import torch

from megatron import costs
from megatron.errors import ConfigError
from megatron.model.attention.core import KERNELS
from megatron.model.gpt2_model import build_model
from megatron.text_generation import InferenceRunner, generate_samples_from_prompt, stream_tokens
from tests.helpers.geometries import GQA_TP4, MHA, MQA, NARROW, WIDE_NON_DIVISIBLE
from tests.unit.test_generation_model import NO_EOS, VOCABULARY, generation_args, greedy_by_full_forward

PROMPTS = [[17, 5, 99, 64, 2, 8, 31, 31, 7], [3, 3, 64, 21, 8, 110, 2, 45, 90, 6, 12]]
SHORTEST = 9
END = SHORTEST + 12
CASES = {
    "rotary": dict(**WIDE_NON_DIVISIBLE, pos_emb="rotary"),
    "window": dict(**NARROW, pos_emb="rotary", sliding_window_width=4),
    "window_of_all": dict(**MHA, pos_emb="learned", sliding_window_width=END),
    "full_then_sliding": dict(
        **GQA_TP4, pos_emb="rotary", sliding_window_width=3, layer_types=["full_attention", "sliding_attention"]
    ),
    "mqa_joint_norm": dict(**MQA, pos_emb="rotary", sliding_window_width=2, use_qk_layernorm=True),
}
ALIBI = dict(**WIDE_NON_DIVISIBLE, pos_emb="alibi", sliding_window_width=5, attention_config=["global"] * 2)
ON_EVERY_KERNEL = [
    pytest.param(dict(**case, attention_config=[kernel] * 2), id=f"{name}-{kernel}")
    for name, case in CASES.items()
    for kernel in KERNELS
]


def last_state(neox_args, runner, prompts=PROMPTS, **options):
    *_, state = stream_tokens(neox_args, runner, prompts, eos_token_id=NO_EOS, **options)
    return state


def with_settings(runner, **changes):
    """A runner for the same model under other settings of generation."""
    neox_args = generation_args(**runner.settings, return_logits=True, **changes)
    return neox_args, InferenceRunner(neox_args, runner.model)


class Built:
    """A model and the settings that it was built from."""

    def __init__(self, settings):
        self.settings = settings
        self.model = build_model(generation_args(**settings)).eval()


def smallest_margin(logits):
    """Between the likeliest token and the next, over all steps and rows of logits [steps, b, v]."""
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    return (first - second).min().item()


@pytest.mark.parametrize("settings", [*ON_EVERY_KERNEL, pytest.param(ALIBI, id="alibi-global")])
def test_pieces_give_the_tokens_of_a_full_forward(settings):
    built = Built(settings)
    expected = [greedy_by_full_forward(built.model, prompt, END) for prompt in PROMPTS]
    assert len({token for row in expected for token in row[-10:]}) > 4, "the model repeats itself: a weak test"
    logits = None
    for size in (None, 1, 2, 4, 5, SHORTEST, 30):
        state = last_state(*with_settings(built, prefill_chunk_size=size), maximum_tokens=END - SHORTEST)
        assert state.tokens[:, :END].tolist() == expected, size
        logits = state.logits.clone() if logits is None else logits
        torch.testing.assert_close(state.logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_eight_bit_caches_give_the_same_tokens_in_pieces(kv_cache_dtype):
    """Rounding differs from the exact cache, by design; it does not depend on the pieces."""
    for settings in (CASES["full_then_sliding"], ALIBI):
        built = Built(settings)
        exact = last_state(*with_settings(built), maximum_tokens=END - SHORTEST).logits.clone()
        whole = None
        for size in (None, 1, 2, 4, 5, SHORTEST):
            neox_args, runner = with_settings(built, prefill_chunk_size=size, kv_cache_dtype=kv_cache_dtype)
            state = last_state(neox_args, runner, maximum_tokens=END - SHORTEST)
            whole = whole or (state.tokens.clone(), smallest_margin(state.logits))
            assert torch.equal(state.tokens, whole[0]), size
            assert runner.cache_bytes == costs.kv_cache_bytes(neox_args, len(PROMPTS), END - 1)
        assert whole[1] > 0.01, "two tokens are nearly as likely: a weak test"
        # The first step differs by the cache's rounding only; later ones may follow another token.
        assert 1e-4 < (state.logits[0] - exact[0]).abs().max() < 1.0


def test_only_the_last_piece_reaches_the_output_layer():
    built = Built(CASES["window"])
    neox_args, runner = with_settings(built, prefill_chunk_size=4)
    fed = {}
    for index, layer in runner.layers:
        if isinstance(layer, torch.nn.Module):
            layer.register_forward_hook(
                lambda _, inputs, output, index=index: fed.setdefault(index, []).append(tuple(output.shape[:2]))
            )
    last_state(neox_args, runner, maximum_tokens=3)
    steps = [(2, 4), (2, 4), (2, 1), (2, 1), (2, 1)]
    assert fed[0] == steps, "[b, s] of the pieces and of two more tokens"
    assert fed[2] == fed[3] == [(length, rows) for rows, length in steps]
    assert fed[max(fed)] == [(2, 1)] * 3, "one position, once for each generated token"


def test_one_runner_serves_prompts_in_a_row():
    """The ring of one prompt leaves nothing to the next, though it is not allocated again."""
    built = Built(CASES["window"])
    neox_args, runner = with_settings(built, prefill_chunk_size=3)
    texts = [" ".join(map(str, prompt)) for prompt in PROMPTS]
    records = generate_samples_from_prompt(neox_args, runner, texts, eos_token_id=NO_EOS, maximum_tokens=8)
    for prompt, record in zip(PROMPTS, records, strict=True):
        expected = greedy_by_full_forward(built.model, prompt, len(prompt) + 8)[len(prompt) :]
        assert record["text"] == " ".join(map(str, expected))
    assert runner.cache_bytes == costs.kv_cache_bytes(neox_args, 1, len(PROMPTS[1]) + 8 - 1)
    assert runner.cache_bytes == 2 * 5 * 2 * 2 * 24 * 4, "2 layers, 5 tokens, keys and values of 2 heads, fp32"


def test_settings_of_the_cache_are_refused_without_one():
    built = Built(CASES["rotary"])
    neox_args, runner = with_settings(built, prefill_chunk_size=4, kv_cache_dtype="int8")
    with pytest.raises(
        ConfigError, match="(?s)kv_cache_dtype=int8.*recompute=True.*prefill_chunk_size=4.*recompute=True"
    ):
        last_state(neox_args, runner, maximum_tokens=3, recompute=True)
    last_state(*with_settings(built), maximum_tokens=3, recompute=True)


def test_without_a_cache_nothing_is_fed_in_pieces():
    """A runner that was never started runs the whole text, whatever prefill_chunk_size says."""
    built = Built(CASES["rotary"])
    _, runner = with_settings(built, prefill_chunk_size=4)
    tokens = torch.tensor(PROMPTS[:1])
    positions = torch.arange(SHORTEST).unsqueeze(0)
    with torch.no_grad():
        expected = built.model((tokens, positions))[:, -1]
    torch.testing.assert_close(runner.next_token_logits(tokens, positions), expected, atol=2e-5, rtol=2e-5)
    assert expected.shape[-1] >= VOCABULARY
