"""Data, training, a resume and generation through the real launcher, as `make demo` does it."""

import json

from tests.e2e.programs import deepy, log_of, losses_of, write_config


def test_train_resume_and_generate(workplace):
    saving = dict(save="runs/halves", load="runs/halves", checkpoint_factor=10, tensorboard_dir="runs/halves/tb")
    write_config(workplace, "halves.yml", **saving)
    write_config(workplace, "half.yml", exit_interval=10)
    write_config(workplace, "whole.yml", log_dir="runs/whole")

    first = deepy(workplace, "train.py", "model.yml", "halves.yml", "half.yml")
    assert "40 -> 120" in first.stdout, "the QKV projection is not in the table that is printed at the start"
    assert "72 -> 40" in first.stdout
    assert (workplace / "runs/halves/latest").read_text() == "global_step10"
    deepy(workplace, "train.py", "model.yml", "halves.yml")
    deepy(workplace, "train.py", "model.yml", "whole.yml")

    resumed, whole = losses_of(workplace / "runs/halves"), losses_of(workplace / "runs/whole")
    assert sorted(whole) == list(range(1, 21))
    assert resumed == whole, "a resumed run must give the uninterrupted run's losses exactly"
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
