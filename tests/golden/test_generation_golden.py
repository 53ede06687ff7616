"""Greedy generation gives the tokens that GPT-NeoX generated with its KV cache from the same weights."""

import json

import pytest

from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model
from megatron.text_generation import InferenceRunner, stream_tokens
from tests.golden import cases
from tests.helpers.distributed import run_distributed

CASES = ("case2_llama_gqa", "case5_headdim32_gqa")
NEW_TOKENS = 16


def golden_texts(case):
    """[(prompt, continuation)]"""
    results = json.loads((cases.DATA / case / "generation.json").read_text())["results"]
    return [(result["prompt"], result["cache"]) for result in results]


def _generated(args, runner, prompts, **options):
    *_, state = stream_tokens(args, runner, prompts, **options)
    return [
        tokens[start : end + 1]
        for tokens, start, end in zip(state.tokens.tolist(), state.start_index, state.end_index, strict=True)
    ]


def all_texts(rank, world_size, tp, pp):
    """{case: (each prompt alone with the cache, then without, both in one batch)}"""
    texts = {}
    for case in CASES:
        args = cases.arguments(case, tp, pp)
        args.build_tokenizer()
        initialize_megatron(args)
        model = build_model(args)
        cases.load(model, case, tp, rank % tp)
        runner = InferenceRunner(args, model)
        prompts = [prompt for prompt, _ in golden_texts(case)]
        alone = [_generated(args, runner, [prompt], maximum_tokens=NEW_TOKENS)[0] for prompt in prompts]
        recomputed = [
            _generated(args, runner, [prompt], maximum_tokens=NEW_TOKENS, recompute=True)[0] for prompt in prompts
        ]
        longest_to_end = max(map(len, prompts)) - min(map(len, prompts)) + NEW_TOKENS
        batch = _generated(args, runner, prompts, maximum_tokens=longest_to_end)
        texts[case] = (alone, recomputed, [tokens[:NEW_TOKENS] for tokens in batch])
    return texts


@pytest.mark.parametrize("tp, pp", [(1, 0), (1, 1), (2, 0), (1, 2)])
def test_tokens_equal_gpt_neox(tp, pp, tmp_path):
    for rank, texts in enumerate(run_distributed(tp * max(pp, 1), all_texts, tp, pp, tmp_path=tmp_path)):
        for case in CASES:
            expected = [continuation for _, continuation in golden_texts(case)]
            for what, tokens in zip(("cached", "recomputed", "in one batch"), texts[case], strict=True):
                assert tokens == expected, f"{case}, rank {rank}, {what}"
