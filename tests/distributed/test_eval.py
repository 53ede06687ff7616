"""Scores, texts and perplexity over tensor-parallel ranks, pipeline stages and replicas equal transformers'."""

import json
import os

import pytest

from megatron.errors import ConfigError, DataError
from megatron.evaluation import complete, score
from megatron.evaluation.run import Evaluation
from megatron.evaluation.service import with_all_ranks
from megatron.initialize import initialize_megatron
from megatron.text_generation.setup import load_runner
from tests.helpers.distributed import run_distributed
from tests.helpers.evaluation import CONTEXT, TEXT, greedy, hf_tokenizer, hf_twin, save_twin, twin_args
from tests.helpers.tolerances import LOSS
from tests.unit.test_eval import PROMPTS, TOLERANCE, completions, expected_score, pairs_of
from tests.unit.test_perplexity import expected_nats

HEAD_ALONE = "type:EmbeddingPipe|ParallelLinearPipe"
LAYOUTS = {
    "tp2": dict(model_parallel_size=2),
    "pp2_tp2": dict(pipe_parallel_size=2, model_parallel_size=2, pipe_partition_method=HEAD_ALONE),
    "dp2": dict(global_num_gpus=2),
}


def rank_evaluates(rank, world_size, layout, folder, pairs):
    """(scores, pairs that this rank ran, texts, results) of this rank."""
    os.chdir(folder)
    request = dict(load="checkpoint", perplexity_file="text.txt", perplexity_stride=11, eval_batch_size=3)
    args = twin_args(**{"global_num_gpus": world_size, **layout, **request})
    initialize_megatron(args)
    evaluation = Evaluation(args)
    runner = load_runner(args)
    done = []
    scores = score(args, runner, pairs, 2, done.append)
    texts = complete(args, runner, completions(args, until=("\0",)), 3)
    check_errors(args)
    return scores, sum(done), texts, evaluation.run(runner)


def check_errors(args):
    """Every rank raises what the asking rank raises, before and between calls, and what all of them meet."""
    with pytest.raises(DataError, match="no/such/text"):
        Evaluation(args.update(perplexity_file="no/such/text"))

    def program(call):
        assert call("a", 1) == ("a", 1)
        raise ConfigError("between two calls")

    with pytest.raises(ConfigError, match="between two calls"):
        with_all_ranks(program, lambda *request: request)

    def fail(*request):
        raise DataError("on all ranks")

    with pytest.raises(DataError, match="on all ranks"):
        with_all_ranks(lambda call: call("a"), fail)


@pytest.fixture(scope="module")
def hf():
    return hf_twin()


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_transformers(name, hf, tmp_path):
    layout, pairs = LAYOUTS[name], pairs_of(hf)
    save_twin(tmp_path / "checkpoint", hf)
    (tmp_path / "text.txt").write_text(TEXT)
    world_size = 4 if name == "pp2_tp2" else 2
    ranks = run_distributed(world_size, rank_evaluates, layout, str(tmp_path), pairs, tmp_path=tmp_path)
    expected = [expected_score(hf, *pair) for pair in pairs]
    tokens = hf_tokenizer()(TEXT)["input_ids"]
    for rank, (scores, done, texts, results) in enumerate(ranks):
        for (total, is_greedy), (expected_total, expected_greedy) in zip(scores, expected, strict=True):
            assert total == pytest.approx(expected_total, abs=TOLERANCE) and is_greedy == expected_greedy, rank
        assert texts == [greedy(hf, prompt, 9) for prompt in PROMPTS]
        assert done == len(pairs) or name == "dp2"
        assert (results is None) == (rank > 0)
    if name == "dp2":
        assert sum(done for _, done, _, _ in ranks) == len(pairs) and all(done for _, done, _, _ in ranks)
    (path,) = tmp_path.glob("eval_results_*.json")
    written = json.loads(path.read_text())
    assert written == ranks[0][3] and written["config"]["iteration"] == 5
    found = written["perplexity"]
    assert found["loss"] == pytest.approx(expected_nats(hf, tokens, 11) / len(tokens), abs=LOSS)
    assert (found["context_length"], found["tokens"]) == (CONTEXT, len(tokens))
