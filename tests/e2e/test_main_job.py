"""Data, training, a resume and generation through the real launcher, as `make demo` does it."""

import json

import pytest

from tests.e2e.programs import deepy, kill_while_saving, log_of, losses_of, write_config


@pytest.fixture(scope="module")
def whole(workplace):
    """{iteration: loss} of a run that was never interrupted."""
    write_config(workplace, "whole.yml", log_dir="runs/whole")
    deepy(workplace, "train.py", "model.yml", "whole.yml")
    return losses_of(workplace / "runs/whole")


def test_train_resume_and_generate(workplace, whole):
    saving = dict(save="runs/halves", load="runs/halves", checkpoint_factor=10, tensorboard_dir="runs/halves/tb")
    write_config(workplace, "halves.yml", **saving)
    write_config(workplace, "half.yml", exit_interval=10)

    first = deepy(workplace, "train.py", "model.yml", "halves.yml", "half.yml")
    assert "40 -> 120" in first.stdout, "the QKV projection is not in the table that is printed at the start"
    assert "72 -> 40" in first.stdout
    assert (workplace / "runs/halves/latest").read_text() == "global_step10"
    deepy(workplace, "train.py", "model.yml", "halves.yml")

    assert sorted(whole) == list(range(1, 21))
    assert losses_of(workplace / "runs/halves") == whole, (
        "a resumed run must give the uninterrupted run's losses exactly"
    )
    assert whole[20] < whole[1] - 0.5, "nothing was learned"
    assert (workplace / "runs/halves/loss_curve.png").stat().st_size > 1000
    assert any((workplace / "runs/halves/tb").rglob("events.*"))
    assert {"lr", "grad_norm", "tokens_per_second", "tflops"} <= set(log_of(workplace / "runs/whole")[0])

    (workplace / "prompts.txt").write_text("import os\n---\ndef run(\n---\nThe")
    asking = dict(text_gen_type="input-file", sample_input_file="prompts.txt", prompt_end="\n---\n", maximum_tokens=8)
    write_config(workplace, "ask.yml", **asking, sample_output_file="samples.jsonl")
    deepy(workplace, "generate.py", "model.yml", "halves.yml", "ask.yml")
    records = [json.loads(line) for line in (workplace / "samples.jsonl").read_text().splitlines()]
    assert [record["context"] for record in records] == ["import os", "def run(", "The"]
    assert all(0 < record["length"] <= 8 for record in records)


def test_a_finished_run_started_again_says_so(workplace):
    write_config(workplace, "short.yml", save="runs/short", load="runs/short", checkpoint_factor=5, exit_interval=20)
    deepy(workplace, "train.py", "model.yml", "short.yml")
    again = deepy(workplace, "train.py", "model.yml", "short.yml")
    assert "train_iters=20 is reached already" in again.stdout
    assert sorted(losses_of(workplace / "runs/short")) == list(range(1, 21))


def test_a_run_killed_during_a_save_goes_on_from_the_last_good_checkpoint(workplace, whole):
    saving = dict(save="runs/killed", load="runs/killed", checkpoint_factor=1, keep_last_n_checkpoints=2)
    write_config(workplace, "killed.yml", **saving)
    kill_while_saving(workplace, "model.yml", "killed.yml", save="runs/killed")
    assert list((workplace / "runs/killed").glob(".saving_*")), "the save was over before the kill"

    resumed = deepy(workplace, "train.py", "model.yml", "killed.yml")
    assert "continuing from runs/killed/global_step" in resumed.stdout
    assert losses_of(workplace / "runs/killed") == whole, "the losses must be those of a run that was never killed"
    left = sorted(path.name for path in (workplace / "runs/killed").iterdir() if path.is_dir())
    assert left == ["global_step19", "global_step20"]
