"""lm-evaluation-harness itself, if it is installed: its own `hf` model and ours answer every request alike."""

import importlib.util

import pytest

from megatron.errors import ConfigError, DataError
from megatron.evaluation.run import _perform
from tests.helpers.evaluation import (
    CONTEXT,
    TEXT,
    hf_tokenizer,
    hf_twin,
    twin_args,
    twin_runner,
    write_tasks,
)

HARNESS = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(
    not HARNESS, reason="needs lm-evaluation-harness: pip install -r requirements/requirements-eval.txt"
)


@pytest.mark.skipif(HARNESS, reason="lm-evaluation-harness is installed")
def test_without_the_harness_the_way_to_it_is_named():
    with pytest.raises(ConfigError, match="pip install -r requirements/requirements-eval.txt.*--perplexity FILE works"):
        import megatron.evaluation.adapter  # noqa: F401


@pytest.fixture(scope="module")
def hf():
    return hf_twin()


@pytest.fixture(scope="module")
def theirs(hf):
    from lm_eval.models.huggingface import HFLM

    # Its cache (0.4.13) mixes up two splits of one text into context and continuation, as PAIRS has them.
    options = dict(backend="causal", batch_size=3, device="cpu", logits_cache=False)
    return HFLM(pretrained=hf, tokenizer=hf_tokenizer(), **options)


@pytest.fixture(scope="module")
def args():
    return twin_args(eval_batch_size=3)


@pytest.fixture(scope="module")
def ours(args, hf):
    from megatron.evaluation.adapter import NeoXLM

    runner = twin_runner(args, hf)
    return NeoXLM(args, lambda *request: _perform(args, runner, *request))


def instances(kind, requests):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, request, number) for number, request in enumerate(requests)]


PAIRS = [
    ("The mayor was a careful", " man"),
    ("The mayor was a careful", " wall"),
    ("", "Nobody knew"),
    ("Nobody knew ", "why"),  # the space belongs to the continuation
    ("Nobody kn", "ew why"),  # within a token
    ("\N{EURO SIGN}40 ", "were missing"),
    (TEXT, " and the snow began again."),
    ("x", TEXT[:40]),
]


@needs_harness
def test_log_probabilities(ours, theirs):
    expected = theirs.loglikelihood(instances("loglikelihood", PAIRS))
    found = ours.loglikelihood(instances("loglikelihood", PAIRS))
    for (total, greedy), (their_total, their_greedy) in zip(found, expected, strict=True):
        assert total == pytest.approx(their_total, abs=2e-4) and greedy == their_greedy


@needs_harness
def test_a_context_of_spaces_only(ours):
    """Its spaces belong to the continuation, and nothing is left of it; the harness's own model fails there."""
    found = ours.loglikelihood(instances("loglikelihood", [("\n ", "Nobody"), ("", "\n Nobody")]))
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@needs_harness
def test_log_probabilities_of_whole_texts(ours, theirs):
    requests = instances("loglikelihood_rolling", [(TEXT,), (TEXT[:30],), (TEXT[5:200],)])
    expected = theirs.loglikelihood_rolling(requests)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-3)


@needs_harness
def test_generated_texts(ours, theirs):
    prompts = ["The court", "A", TEXT, "\n\n", "Nobody knew why the north wall"]
    free = theirs.generate_until(instances("generate_until", [(p, {"until": [], "max_gen_toks": 12}) for p in prompts]))
    settings = [
        {"until": [], "max_gen_toks": 12},
        {"until": "e", "max_new_tokens": 12, "do_sample": False, "temperature": 0.0},
        {"until": ["\n", *[text[4:6] for text in free]], "max_gen_toks": 20},
        {"until": ["<|endoftext|>"], "max_gen_toks": CONTEXT - 1, "num_beams": 1},
    ]
    for setting in settings:
        requests = instances("generate_until", [(prompt, setting) for prompt in prompts])
        assert ours.generate_until(requests) == theirs.generate_until(requests), setting


@needs_harness
def test_generation_settings():
    from megatron.evaluation.adapter import MAXIMUM_TOKENS, completion

    assert completion([1], {}) == ((1,), (), MAXIMUM_TOKENS, completion([1], {}).sampling)
    assert completion([1], {}).sampling.greedy
    assert completion([1], {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 5}).sampling.greedy
    sampling = completion([1], {"do_sample": True, "top_p": 0.9}).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 0.9)
    assert completion([1], {"temperature": 0.5}).sampling.temperature == 0.5
    with pytest.raises(ConfigError, match="generation_kwargs: num_beams=4 of the task is not built"):
        completion([1], {"num_beams": 4})


@needs_harness
def test_tasks_in_local_files(tmp_path, args, hf, theirs):
    """Every figure of every task, as the harness computes it from its own model of the same weights."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from megatron.evaluation.adapter import Tasks, tables

    write_tasks(tmp_path / "tasks", hf)
    folder, names = str(tmp_path / "tasks"), ["local_answers", "local_choices", "local_texts", "local_words"]
    expected = simple_evaluate(theirs, tasks=names, task_manager=TaskManager(include_path=folder), bootstrap_iters=100)
    runner = twin_runner(args, hf)
    asked = args.update(eval_tasks=["local_*"], eval_task_folder=folder)
    found = Tasks(asked).run(lambda *request: _perform(asked, runner, *request))
    compare(found["results"], expected["results"])
    assert found["results"]["local_answers"]["exact_match,none"] == 0.4
    assert all(name in tables(found) for name in names)
    assert found["config"]["model_args"]["head_dim"] == 24
    limited = asked.update(eval_tasks=[f"{folder}/local_words.yaml"], eval_limit=2, eval_num_fewshot=1)
    results = Tasks(limited).run(lambda *request: _perform(limited, runner, *request))
    assert results["n-samples"]["local_words"]["effective"] == 2 and results["n-shot"]["local_words"] == 1


def compare(found, expected):
    assert found.keys() == expected.keys()
    for task, figures in expected.items():
        assert found[task].keys() == figures.keys()
        for name, value in figures.items():
            if isinstance(value, float) and "stderr" not in name:
                assert found[task][name] == pytest.approx(value, rel=1e-5), (task, name)
            elif not isinstance(value, float):
                assert found[task][name] == value, (task, name)


@needs_harness
def test_tasks_that_cannot_be_run(tmp_path, args, hf):
    from megatron.evaluation.adapter import Tasks

    with pytest.raises(ConfigError) as error:
        Tasks(args.update(eval_tasks=["no_such_task", "local_*"]))
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "eval_tasks=no_such_task",
        "eval_tasks=local_*",
    ]
    write_tasks(tmp_path / "tasks", hf)
    (tmp_path / "tasks" / "texts.jsonl").unlink()
    tasks = Tasks(args.update(eval_tasks=["local_texts"], eval_task_folder=str(tmp_path / "tasks")))
    with pytest.raises(DataError, match="eval_tasks=local_texts: data of a task could not be read"):
        tasks.run(lambda *request: [])
