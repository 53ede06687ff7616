"""`deepy.py eval.py` on two tensor-parallel processes: a text's perplexity, and with the harness the tasks too."""

import importlib.util
import json

import pytest

from megatron.convert.exporting import export_hf
from megatron.convert.importing import import_hf
from tests.e2e.programs import deepy, write_config
from tests.helpers.evaluation import TEXT, hf_tokenizer, hf_twin, save_hf_twin, write_tasks
from tests.helpers.tolerances import LOSS
from tests.unit.test_perplexity import expected_nats

HARNESS = importlib.util.find_spec("lm_eval") is not None
TASKS = ("local_answers", "local_choices", "local_texts", "local_words")


@pytest.fixture(scope="module")
def hf():
    return hf_twin()


@pytest.fixture(scope="module")
def place(tmp_path_factory, hf):
    """A folder with an imported checkpoint, its config, a text and tasks."""
    folder = tmp_path_factory.mktemp("eval")
    save_hf_twin(folder / "hf", hf)
    import_hf(str(folder / "hf"), str(folder / "neox"), progress=False)
    write_tasks(folder / "tasks", hf)
    (folder / "text.txt").write_text(TEXT)
    config = (folder / "neox" / "model.yml").read_text().replace("model_parallel_size: 1", "model_parallel_size: 2")
    (folder / "model.yml").write_text(config)
    write_config(folder, "eval.yml", distributed_backend="gloo", eval_task_folder="tasks", eval_batch_size=3)
    return folder


def test_perplexity_of_a_text(place, hf):
    options = ("--perplexity", "text.txt", "--eval_results_prefix", "text")
    finished = deepy(place, "eval.py", "model.yml", "eval.yml", *options)
    assert "text.txt: loss " in finished.stdout and "bits per byte" in finished.stdout
    (path,) = place.glob("text_eval_results_*.json")
    found = json.loads(path.read_text())["perplexity"]
    tokens = hf_tokenizer()(TEXT)["input_ids"]
    assert found["loss"] == pytest.approx(expected_nats(hf, tokens, found["context_length"]) / len(tokens), abs=LOSS)


@pytest.mark.skipif(
    not HARNESS, reason="needs lm-evaluation-harness: pip install -r requirements/requirements-eval.txt"
)
def test_tasks_as_the_harness_finds_them_for_the_exported_model(place, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = ("--eval_tasks", "local_*", "--eval_results_prefix", "tasks")
    finished = deepy(place, "eval.py", "model.yml", "eval.yml", *options)
    (path,) = place.glob("tasks_eval_results_*.json")
    results = json.loads(path.read_text())
    assert all(name in finished.stdout for name in TASKS)
    export_hf(str(place / "neox"), str(place / "exported"), config_files=[str(place / "neox" / "model.yml")])
    expected = simple_evaluate(
        "hf",
        f"pretrained={place / 'exported'},logits_cache=False",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(place / "tasks")),
        batch_size=3,
        device="cpu",
        bootstrap_iters=10,
    )
    figures = {
        (task, name): value
        for task, found in expected["results"].items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }
    assert len(figures) == 9
    for (task, name), value in figures.items():
        assert results["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)
