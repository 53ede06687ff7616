"""`python -m tools.head_dim sweep` through the real launcher: killed, gone on with, reported."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from tests.e2e.programs import MODEL, ROOT, losses_of, succeed
from tools.head_dim.__main__ import main

BASE = {key: value for key, value in MODEL.items() if key not in ("data_path", "tokenizer_type", "vocab_file")}
STEPS = 12
STUDY = {
    "name": "written or not",
    "data": {"source": "text.jsonl", "vocab_size": 300},
    "base": {**BASE, "hidden_size": 72, "num_attention_heads": 6, "head_dim": None},
    "settings": {"train_iters": STEPS, "checkpoint_factor": 1, "log_head_diagnostics": 12, "eval_interval": 6},
    "variants": [{"name": "written", "settings": {"head_dim": 12}}, {"name": "absent"}],
    "at_equal": "params",
    "seeds": [1, 2],
}
"""72 / 6 is 12: the variants are one model, so that they must give equal numbers, killed or not."""
COMMAND = ("-m", "tools.head_dim", "sweep", "study.yml", "--out", "out", "--jobs")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a study and its text: the paragraphs of this project's pages."""
    folder = tmp_path_factory.mktemp("sweep")
    pages = [path.read_text() for path in sorted(ROOT.glob("*.md"))]
    records = [json.dumps({"text": paragraph}) for page in pages for paragraph in page.split("\n\n")]
    (folder / "text.jsonl").write_text("\n".join(records))
    (folder / "study.yml").write_text(yaml.safe_dump(STUDY))
    return folder


@pytest.fixture(scope="module")
def killed(place):
    """The sweep and its runs, ended at once when the first run was done and the second had begun."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(place / "killed.log", "w") as log:
        command = [sys.executable, *COMMAND, "1"]
        sweep = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
    second = place / "out/runs/absent/seed_1"
    deadline = time.monotonic() + 240
    try:
        while not (second / "checkpoints/latest").exists():
            assert sweep.poll() is None and time.monotonic() < deadline, (place / "killed.log").read_text()
            time.sleep(0.02)
    finally:
        for process in [*psutil.Process(sweep.pid).children(recursive=True), sweep]:
            process.kill()
        sweep.wait()
    return second


def test_a_killed_sweep_goes_on_and_reports(place, killed, capsys, monkeypatch):
    assert json.loads((killed / "state.json").read_text())["status"] == "unfinished"
    before = (place / "out/runs/written/seed_1/train_log.jsonl").read_bytes()
    shown = succeed(place, *COMMAND, "2").stdout
    assert "1 of 4 runs are done already" in shown and "absent, seed 2: finished" in shown

    assert (place / "out/runs/written/seed_1/train_log.jsonl").read_bytes() == before, "a finished run was touched"
    states = {path.parent.parent.name + path.parent.name[-1]: json.loads(path.read_text())
              for path in (place / "out/runs").glob("*/*/state.json")}  # fmt: skip
    attempts = {name: state["attempts"] for name, state in states.items()}
    assert {state["status"] for state in states.values()} == {"finished"}
    assert attempts == {"written1": 1, "absent1": 2, "written2": 1, "absent2": 1}
    losses = {run: losses_of(place / "out/runs" / run) for run in (
        "written/seed_1", "absent/seed_1", "written/seed_2", "absent/seed_2")}  # fmt: skip
    assert sorted(losses["absent/seed_1"]) == list(range(1, STEPS + 1))
    assert losses["absent/seed_1"] == losses["written/seed_1"], "killed and gone on with, it must give the same losses"
    assert losses["absent/seed_2"] == losses["written/seed_2"] != losses["written/seed_1"]

    results = json.loads((place / "out/results.json").read_text())
    written, absent = results["variants"]
    assert written["parameters"] == absent["parameters"] and written["widths"] == absent["widths"]
    row = next(row for row in results["ranking"] if row["variant"] == "absent")
    assert row["difference"] == 0 and row["verdict"] == "not decided" and row["seeds"] == [1, 2]
    for run in results["runs"]:
        assert run["status"] == "finished" and run["validation"]["step"] == [6, 12]
        assert [look["iteration"] for look in run["heads"]] == [12]
        assert len(run["heads"][-1]["layers"][1]["figures"]["entropy"]) == 6
        assert run["tokens_per_second"] > 0 and run["peak_rss_bytes"] > 100 * 2**20
    assert (place / "out/report.html").stat().st_size > 100_000

    monkeypatch.chdir(place)
    assert main([*COMMAND[2:6], "--report-only"]) == 0
    assert json.loads((place / "out/results.json").read_text()) == results
    (place / "study.yml").write_text(yaml.safe_dump({**STUDY, "seeds": [1], "settings": {"train_iters": 7}}))
    assert main([*COMMAND[2:6]]) == 2
    assert "written, seed 1 was trained with other settings: " in capsys.readouterr().err
