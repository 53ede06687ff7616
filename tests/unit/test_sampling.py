"""Token choice against transformers' own processors and against the probabilities it must draw from."""

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron.errors import ConfigError
from megatron.text_generation.sampling import SamplingSettings, choose_tokens, filter_logits, seeded_generator


def random_logits(rows=5, vocabulary=37, seed=0):
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def transformers_filter(logits, top_k, top_p):
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits


@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 36, 37, 100])
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.3, 0.9, 0.999, 1.0])
def test_filters_equal_transformers(top_k, top_p):
    logits = random_logits()
    before = logits.clone()
    torch.testing.assert_close(filter_logits(logits, top_k, top_p), transformers_filter(logits, top_k, top_p))
    assert torch.equal(logits, before), "the input was changed"


def test_top_p_keeps_the_smallest_set_beyond_p():
    probabilities = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    kept = {p: (filter_logits(probabilities.log(), 0, p) > -math.inf)[0].tolist() for p in (0.01, 0.45, 0.6, 0.8, 0.95)}
    assert kept == {
        0.01: [False, True, False, False],
        0.45: [False, True, False, False],
        0.6: [False, True, False, True],
        0.8: [False, True, True, True],
        0.95: [True, True, True, True],
    }


def test_ties_with_the_kth_token_stay():
    kept = filter_logits(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), top_k=2) > -math.inf
    assert kept.tolist() == [[False, True, True, True, False]]


def test_greedy_only_when_everything_is_zero():
    logits = random_logits()
    assert SamplingSettings().greedy
    assert torch.equal(choose_tokens(logits, SamplingSettings()), logits.argmax(-1))
    for settings in (SamplingSettings(0.5), SamplingSettings(0, 3), SamplingSettings(0, 0, 0.5)):
        assert not settings.greedy


@pytest.mark.parametrize("settings", [(0.7, 0, 0.0), (0.0, 4, 0.0), (1.5, 6, 0.8), (0.0, 0, 0.7)])
def test_draws_follow_the_filtered_probabilities(settings):
    """Chi-square of 20,000 draws against the probabilities of transformers; temperature 0 leaves logits alone."""
    temperature, top_k, top_p = settings
    logits = random_logits(rows=1, vocabulary=11, seed=3) / 2
    expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature else logits
    expected = transformers_filter(expected, top_k, top_p).softmax(-1)[0].double()
    draws = 20_000
    tokens = choose_tokens(logits.expand(draws, -1), SamplingSettings(*settings), seeded_generator("cpu", 1234))
    counts = torch.bincount(tokens, minlength=11).double()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom), f"{chi_square} with {freedom} degrees of freedom"


def test_half_precision_logits_are_drawn_in_fp32():
    logits = random_logits().bfloat16()
    settings = SamplingSettings(0.8, 5, 0.9)
    in_half = choose_tokens(logits, settings, seeded_generator("cpu", 7))
    assert torch.equal(in_half, choose_tokens(logits.float(), settings, seeded_generator("cpu", 7)))


def test_random_stream_depends_on_seed_and_sample_only():
    def numbers(seed, sample):
        return torch.rand(4, generator=seeded_generator("cpu", seed, sample)).tolist()

    assert numbers(1234, 0) == numbers(1234, 0)
    distinct = {tuple(numbers(seed, sample)) for seed in (1234, 1235, -1, 0) for sample in range(3)}
    assert len(distinct) == 12


def test_every_bad_setting_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        SamplingSettings(-1.0, 2.5, 1.5)
    assert [problem.split("=")[0] for problem in error.value.problems] == ["temperature", "top_k", "top_p"]


@pytest.mark.parametrize("bad", [dict(temperature=float("nan")), dict(top_k=True), dict(top_k=-1), dict(top_p=-0.1)])
def test_bad_setting_is_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SamplingSettings(**bad)
