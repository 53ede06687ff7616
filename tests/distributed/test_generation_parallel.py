"""Greedy and sampled generation over tensor-parallel ranks and pipeline stages equals one process, token for token."""

import io
import time

import pytest
import torch

from megatron.costs import kv_cache_bytes
from megatron.errors import DataError
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model
from megatron.text_generation import (
    InferenceRunner,
    generate_samples_from_prompt,
    generate_samples_input_from_file,
    generate_samples_interactive,
    stream_tokens,
)
from megatron.text_generation.collective import from_rank_0, from_rank_0_when_ready
from tests.helpers import geometries
from tests.helpers.distributed import run_distributed
from tests.unit.test_generation_model import EXTRAS, NO_EOS, POSITIONS, PROMPTS, VOCABULARY, generation_args

STEPS = 14
SAMPLED = dict(temperature=1.3, top_k=20, top_p=0.9)
WIDE, NARROW, GQA = geometries.WIDE_NON_DIVISIBLE, geometries.NARROW, geometries.GQA_TP4
POSITION_CASES = {
    name: {**geometry, **POSITIONS[name]}
    for name, geometry in zip(POSITIONS, [WIDE, NARROW, GQA, WIDE, GQA, NARROW, WIDE], strict=True)
}
EXTRA_CASES = {
    name: {**WIDE, **EXTRAS[name]}
    for name in ("qk_rmsnorm", "window", "flash", "swiglu_rmsnorm_tied", "gpt_j_residual")
}
WIDTHS = {
    **dict(hidden_size=80, num_attention_heads=6, num_kv_heads=[2, 3], pos_emb="rotary"),
    **dict(head_dim=[[24, 2], {"layer": 1, "groups": [[16, 4], [40, 2]]}], qk_norm_type="per_head", norm="rmsnorm"),
}
CASES = {**POSITION_CASES, **EXTRA_CASES, "widths": WIDTHS}
PIPELINE_CASES = {name: case for name, case in CASES.items() if case["pos_emb"] != "rpe"}


def generate(settings, **options):
    neox_args = generation_args(**settings, return_logits=True)
    initialize_megatron(neox_args)
    runner = InferenceRunner(neox_args, build_model(neox_args))
    *_, state = stream_tokens(neox_args, runner, PROMPTS, eos_token_id=NO_EOS, maximum_tokens=STEPS, **options)
    return state.tokens.tolist(), state.logits.numpy()


def rank_generates(rank, world_size, cases, layout):
    results = {}
    for name, settings in cases.items():
        settings = {**settings, **layout}
        tokens, logits = generate(settings)
        sampled, _ = generate(settings, **SAMPLED)
        recomputed, _ = generate(settings, recompute=True)
        results[name] = (tokens, logits, sampled, recomputed)
    return results


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Every case in one process without a pipeline."""
    return run_distributed(1, rank_generates, CASES, {}, tmp_path=tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize(
    "layout, cases",
    [
        (dict(pipe_parallel_size=1), PIPELINE_CASES),
        (dict(model_parallel_size=2), CASES),
        (dict(pipe_parallel_size=2), PIPELINE_CASES),
        (dict(pipe_parallel_size=2, model_parallel_size=2), {"rotary": CASES["rotary"], "alibi": CASES["alibi"]}),
        (dict(pipe_parallel_size=1, model_parallel_size=2), {"learned": CASES["learned"]}),
        (dict(global_num_gpus=2), {"sinusoidal": CASES["sinusoidal"]}),
    ],
    ids=["pp1", "tp2", "pp2", "pp2_tp2", "pp1_tp2", "dp2"],
)
def test_layouts_equal_one_process(layout, cases, one_process, tmp_path):
    model_ranks = layout.get("pipe_parallel_size", 1) * layout.get("model_parallel_size", 1)
    world_size = layout.get("global_num_gpus", model_ranks)
    ranks = run_distributed(world_size, rank_generates, cases, layout, tmp_path=tmp_path)
    for rank, results in enumerate(ranks):
        for name, (tokens, logits, sampled, recomputed) in results.items():
            expected_tokens, expected_logits, expected_sampled, _ = one_process[name]
            assert tokens == expected_tokens, f"{name}, rank {rank}: greedy with cache"
            assert recomputed == expected_tokens, f"{name}, rank {rank}: greedy without cache"
            assert sampled == expected_sampled != expected_tokens, f"{name}, rank {rank}: sampled"
            torch.testing.assert_close(
                torch.from_numpy(logits), torch.from_numpy(expected_logits), atol=1e-4, rtol=1e-4
            )


def test_joint_qk_layernorm_on_two_ranks_with_and_without_cache(tmp_path):
    """Its statistics run over a rank's heads, so only cache and no cache at the same layout can be compared."""
    case = {"joint": {**WIDE, **EXTRAS["joint_qk_layernorm"]}}
    for results in run_distributed(2, rank_generates, case, dict(model_parallel_size=2), tmp_path=tmp_path):
        cached, _, _, recomputed = results["joint"]
        assert cached == recomputed


LONG_PROMPTS = [[17, 5, 99, 64, 2, 8, 31, 31, 7], [3, 3, 64, 21, 8, 110, 2, 45, 90, 6, 12]]
SLIDING = dict(sliding_window_width=3, layer_types=["full_attention", "sliding_attention"])
CACHE_CASES = {
    "window": {**WIDE, **SLIDING, "pos_emb": "rotary"},
    "window_alibi": {**NARROW, **SLIDING, "pos_emb": "alibi", "attention_config": ["global"] * 2},
    "joint_norm": {**GQA, **SLIDING, "pos_emb": "learned", "use_qk_layernorm": True},
}
# Embedding and output layer are as large as three layers together: with three stages each has one to itself.
ENDS_ALONE = dict(num_layers=3, ffn_hidden_size=16, padded_vocab_size=2048, pipe_partition_method="parameters")
CACHE_SETTINGS = [
    dict(),
    dict(prefill_chunk_size=1),
    dict(prefill_chunk_size=4),
    dict(kv_cache_dtype="int8"),
    dict(kv_cache_dtype="int8", prefill_chunk_size=4),
    dict(kv_cache_dtype="fp8_e4m3"),
]


def rank_fills_caches(rank, world_size, cases, layout):
    """(tokens, this rank's cache bytes, the bytes that costs promise for all ranks) of each case and setting."""
    results = {}
    for name, case in cases.items():
        model = None
        for number, cache in enumerate(CACHE_SETTINGS):
            neox_args = generation_args(**case, **layout, **cache)
            if model is None:
                initialize_megatron(neox_args)
                model = build_model(neox_args)
            runner = InferenceRunner(neox_args, model)
            *_, state = stream_tokens(neox_args, runner, LONG_PROMPTS, eos_token_id=NO_EOS, maximum_tokens=10)
            promised = kv_cache_bytes(neox_args, len(LONG_PROMPTS), 9 + 10 - 1)
            results[name, number] = (state.tokens.tolist(), runner.cache_bytes, promised)
    return results


@pytest.fixture(scope="module")
def caches_of_one_process(tmp_path_factory):
    """Every case and setting in one process."""
    return run_distributed(1, rank_fills_caches, CACHE_CASES, {}, tmp_path=tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize(
    "layout, names, copies",
    [
        (dict(model_parallel_size=2), ["window", "window_alibi"], 1),
        (dict(pipe_parallel_size=2), list(CACHE_CASES), 1),
        (dict(pipe_parallel_size=2, model_parallel_size=2), ["window", "window_alibi"], 1),
        (dict(model_parallel_size=4), ["window_alibi"], 2),
    ],
    ids=["tp2", "pp2", "pp2_tp2", "tp4_of_2_kv_heads"],
)
def test_caches_over_ranks(layout, names, copies, caches_of_one_process, tmp_path):
    """Tokens do not depend on the pieces; tokens and summed bytes are those of one process, per setting.

    joint_norm on tensor-parallel ranks is another function: its statistics run over a rank's heads. copies: of each
    key/value head, when there are fewer than ranks.
    """
    world_size = layout.get("pipe_parallel_size", 1) * layout.get("model_parallel_size", 1)
    cases = {name: CACHE_CASES[name] for name in names}
    ranks = run_distributed(world_size, rank_fills_caches, cases, layout, tmp_path=tmp_path)
    for name, number in ranks[0]:
        what = f"{name} {CACHE_SETTINGS[number]}"
        expected, expected_bytes, promised = caches_of_one_process[name, number]
        assert expected_bytes == promised, what
        results = [rank[name, number] for rank in ranks]
        assert all(tokens == expected for tokens, _, _ in results), what
        assert sum(size for _, size, _ in results) == results[0][2] == copies * promised, what


def rank_has_layers(rank, world_size, case, layout):
    neox_args = generation_args(**case, **layout)
    initialize_megatron(neox_args)
    layers = [index for index, _ in InferenceRunner(neox_args, build_model(neox_args)).layers]
    return layers, rank_fills_caches(rank, world_size, {"ends_alone": case}, layout)


def test_stages_without_transformer_layers(tmp_path):
    """The pieces stop at the last transformer layer; only the last one goes on to the stage of the output layer."""
    case = {**WIDE, **ENDS_ALONE, "pos_emb": "rotary", "sliding_window_width": 3}
    (_, expected), *_ = run_distributed(1, rank_has_layers, case, {}, tmp_path=tmp_path)
    ranks = run_distributed(3, rank_has_layers, case, dict(pipe_parallel_size=3), tmp_path=tmp_path)
    stages = [layers for layers, _ in ranks]
    assert max(stages[0]) < 2 and min(stages[2]) > 2 + 3, stages
    for _, results in ranks:
        assert [tokens for tokens, *_ in results.values()] == [tokens for tokens, *_ in expected.values()]


def rank_shares(rank, world_size, folder):
    """What only rank 0 knows reaches the others, its errors too; returns what each rank saw."""
    prompts = f"{folder}/prompts.txt"
    if rank == 0:
        with open(prompts, "w") as file:
            file.write("5 17 99\n77")
    seen = [from_rank_0(lambda: rank), from_rank_0_when_ready(lambda: time.sleep(0.3) or rank, interval=0.05)]
    neox_args = generation_args(**WIDE, pos_emb="rotary", model_parallel_size=world_size)
    initialize_megatron(neox_args)
    runner = InferenceRunner(neox_args, build_model(neox_args))
    seen.append(generate_samples_input_from_file(neox_args, runner, prompts, maximum_tokens=5))
    with pytest.raises(DataError, match="nowhere.txt: No such file"):
        generate_samples_input_from_file(neox_args, runner, f"{folder}/nowhere.txt" if rank == 0 else prompts)
    with pytest.raises(DataError, match="leaves no room"):
        generate_samples_from_prompt(neox_args, runner, "1 " * 24)
    import sys

    sys.stdin = io.StringIO("5 17 99\n" if rank == 0 else "1\n2\n3\n")
    generate_samples_interactive(neox_args, runner, maximum_tokens=5)
    return seen


def test_rank_0_reads_and_every_rank_knows(tmp_path):
    first, second = run_distributed(2, rank_shares, str(tmp_path), tmp_path=tmp_path)
    assert first[:2] == second[:2] == [0, 0]
    assert [record["text"] for record in first[2]] == [record["text"] for record in second[2]]
    assert [record["context"] for record in first[2]] == ["5 17 99", "77"]
    assert all(int(token) < VOCABULARY for record in first[2] for token in (record["text"] or "").split())
    assert sorted(path.name for path in tmp_path.glob("prompts*")) == ["prompts.txt", "prompts.txt.output.jsonl"]
