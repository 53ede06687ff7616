"""tools/head_dim sweep: runs that end in every way, are stopped, go on and are kept, with a launcher that pretends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.errors import ConfigError
from tools.head_dim.sweep import records, results, runner
from tools.head_dim.sweep.plan import PlannedVariant, Run
from tools.head_dim.sweep.progress import View
from tools.head_dim.sweep.study import Variant

DATA = {"text": [10, 11]}
STEPS = 4
LAUNCHER = """
import json, os, signal, sys, time
import yaml

config = yaml.safe_load(open(sys.argv[2]))
folder, saved = config["log_dir"], config["save"]
os.makedirs(saved, exist_ok=True)
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
latest = os.path.join(saved, "latest")
step = int(open(latest).read()) if os.path.exists(latest) else 0
print("from", step, "with", os.environ["OMP_NUM_THREADS"], "threads", flush=True)
log = open(os.path.join(folder, "train_log.jsonl"), "a")
while step < config["train_iters"] and not stops:
    step += 1
    loss = None if config.get("diverges") else 5.0 - step + config["seed"]
    log.write(json.dumps({"iteration": step, "loss": loss, "tokens_per_second": 10.0 * step, "lr": 0.1}) + "\\n")
    log.flush()
    open(latest, "w").write(str(step))
    if config.get("fails"):
        print("error: this is why", flush=True)
        sys.exit(3)
    if config.get("diverges"):
        sys.exit(1)
    time.sleep(config.get("pause", 0))
if step == config["train_iters"]:
    log.write(json.dumps({"iteration": step, "valid_loss": 5.0 - step + config["seed"]}) + "\\n")
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder for a sweep; deepy.py is the launcher above."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "deepy.py").write_text(LAUNCHER)
    monkeypatch.setattr(runner, "ROOT", tmp_path / "program")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return str(tmp_path / "out")


def made(name, seed=1, **settings):
    """A run of four steps."""
    config = {"train_iters": STEPS, **settings}
    variant = PlannedVariant(Variant(name, settings), config, {"head_dim": 8}, 100, 600.0, 1000, STEPS, 1)
    folder = os.path.join("runs", name, f"seed_{seed}")
    own = {"seed": seed, "log_dir": folder, "save": f"{folder}/checkpoints", "load": f"{folder}/checkpoints"}
    return Run(variant, seed, folder, {**config, **own})


def execute(out, runs, jobs=2, keep=False):
    records.refuse_changed(out, runs, DATA, discard=False)
    with View(out) as view:
        runner.execute(out, runs, DATA, jobs, keep, view)
    return [records.read_state(out, each) for each in runs]


def words(out, each):
    return (Path(out) / each.folder / runner.OUTPUT).read_text().splitlines()


def test_runs_that_end_in_every_way_and_a_second_start(place, capsys):
    runs = [made("good"), made("bad", fails=True), made("nan", diverges=True), made("good", seed=2)]
    states = execute(place, runs)
    assert [state.status for state in states] == ["finished", "failed", "diverged", "finished"]
    assert states[1].error == "error: this is why (exit code 3, see output.txt)"
    assert all(state.attempts == 1 for state in states)
    shown = capsys.readouterr().out
    assert "good, seed 2: finished" in shown and "bad, seed 1: failed" in shown and "this is why" in shown
    cores = len(os.sched_getaffinity(0))
    assert words(place, runs[0]) == [f"from 0 with {max(1, cores // 2)} threads"]
    kept = [os.path.exists(os.path.join(place, each.config["save"])) for each in runs]
    assert kept == [False, True, False, False], "checkpoints of runs that are done are of no use"

    states = execute(place, runs)
    assert [state.attempts for state in states] == [1, 2, 1, 1], "only what failed is tried again"
    assert words(place, runs[1])[2].startswith("from 1 "), "it goes on from its checkpoint"
    assert "3 of 4 runs are done already" in capsys.readouterr().out


def test_checkpoints_can_be_kept(place):
    runs = [made("good")]
    execute(place, runs, keep=True)
    assert os.path.exists(os.path.join(place, runs[0].config["save"], "latest"))


def test_an_interrupt_lets_the_active_runs_save_and_they_go_on(place):
    runs = [made("quick"), made("slow", pause=0.3), made("waiting")]

    class Impatient(View):
        def show(self):
            if len(records.log_of(place, runs[1])) >= 2 and records.read_state(place, runs[0]).status == "finished":
                raise KeyboardInterrupt

    records.refuse_changed(place, runs, DATA, discard=False)
    with pytest.raises(KeyboardInterrupt), Impatient(place) as view:
        runner.execute(place, [runs[0], runs[1]], DATA, 2, False, view)
    states = [records.read_state(place, each) for each in runs]
    assert [state.status for state in states[:2]] == ["finished", "unfinished"] and states[2] is None
    stopped_at = len(records.log_of(place, runs[1]))
    assert 2 <= stopped_at < STEPS
    states = execute(place, runs)
    assert [state.status for state in states] == ["finished"] * 3
    assert [state.attempts for state in states] == [1, 2, 1]
    assert words(place, runs[1])[1].startswith(f"from {stopped_at} ")


SWEEP = """
import sys
from pathlib import Path
from tests.unit import test_sweep_runs as tests
from tools.head_dim.sweep import runner
runner.ROOT = Path(sys.argv[1])
tests.execute(sys.argv[2], [tests.made("first"), tests.made("second", pause=1.0)], jobs=1)
"""


def test_a_killed_sweep_leaves_a_lock_with_its_runs_and_goes_on_after_them(place):
    """SIGKILL: the sweep can neither stop its runs nor write what became of them."""
    runs = [made("first"), made("second", pause=1.0)]
    root = str(Path(__file__).resolve().parents[2])
    sweep = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(runner.ROOT), place], cwd=root, stdout=subprocess.DEVNULL
    )
    try:
        _wait_for(lambda: len(records.log_of(place, runs[1])) >= 1, sweep)
        (left,) = psutil.Process(sweep.pid).children()
        sweep.kill()
        sweep.wait()
        with pytest.raises(ConfigError, match="at work there"):
            execute(place, runs)
        left.send_signal(signal.SIGKILL)
        _wait_for(lambda: not psutil.pid_exists(left.pid) or left.status() == psutil.STATUS_ZOMBIE)
    finally:
        sweep.kill()
    done = len(records.log_of(place, runs[1]))
    assert 1 <= done < STEPS
    states = execute(place, runs)
    assert [state.status for state in states] == ["finished", "finished"]
    assert states[0].attempts == 1 and words(place, runs[1])[1].startswith(f"from {done} ")


def _wait_for(condition, process=None):
    deadline = time.monotonic() + 60
    while not condition():
        assert process is None or process.poll() is None, "the sweep has ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_changed_settings_and_data_are_noticed(place):
    runs = [made("good"), made("other")]
    execute(place, runs)
    log = records.log_of(place, runs[0])
    changed = [made("good", lr=0.3), made("other")]
    with pytest.raises(ConfigError) as raised:
        execute(place, changed)
    told = "\n".join(raised.value.problems)
    assert "good, seed 1 was trained with other settings: lr was None, is 0.3" in told
    assert "--discard-changed" in told and "other" not in told.replace("another", "").replace("other settings", "")
    assert records.log_of(place, runs[0]) == log, "nothing is removed unasked"
    with pytest.raises(ConfigError, match="the data are others"):
        records.refuse_changed(place, runs, {"text": [10, 12]}, discard=False)
    records.refuse_changed(place, changed, DATA, discard=True)
    assert [state.attempts for state in execute(place, changed)] == [1, 1]
    assert records.read_state(place, changed[0]).config["lr"] == 0.3


def test_what_is_there_without_a_state_is_begun_anew(place):
    """A run of which the state is torn, as by a full disk, may be of anything."""
    runs = [made("good")]
    execute(place, runs, keep=True)
    Path(place, runs[0].folder, records.STATE).write_text("{")
    (state,) = execute(place, runs)
    assert state.status == "finished" and words(place, runs[0])[0].startswith("from 0 ")


def test_only_one_sweep_at_a_time(tmp_path):
    with runner.locked(str(tmp_path)):
        with pytest.raises(ConfigError, match="at work there"), runner.locked(str(tmp_path)):
            pass
    with runner.locked(str(tmp_path)):
        pass


def test_results_of_runs_done_and_not_done(place):
    runs = [made("good"), made("good", seed=2), made("nan", diverges=True), made("bad", fails=True)]
    execute(place, runs)
    folder = Path(place, runs[0].folder)
    looks = [_look(2, 1.0), _look(4, 2.0), _look(4, 3.14159265)]  # the second look at step 4 is after going on
    lines = [json.dumps(look) for look in looks]
    (folder / results.HEADS).write_text("\n".join(lines) + '\n{"iteration": 5, "lay')
    found = [results._run(place, each) for each in [*runs, made("later")]]
    assert [each["status"] for each in found] == ["finished", "finished", "diverged", "failed", "not started"]
    good = found[0]
    assert good["train"]["step"] == [1, 2, 3, 4] and good["train"]["loss"] == [5.0, 4.0, 3.0, 2.0]
    assert good["train"]["lr"] == [0.1] * 4 and good["train"]["grad_norm"] == [None] * 4
    assert good["validation"] == {"step": [4], "loss": [2.0]}
    assert good["tokens_per_second"] == 30.0, "the median of the intervals but the first"
    assert [look["iteration"] for look in good["heads"]] == [2, 4]
    assert good["heads"][1]["layers"][0]["figures"]["entropy"] == [3.14159]
    assert found[2]["train"]["loss"] == [None] and found[4]["train"]["step"] == []
    ranking = results.ranking("good", ["good", "nan", "bad", "later"], found)
    assert [(row["variant"], row["mean"], row["seeds"]) for row in ranking] == [("good", 2.5, [1, 2])]


def _look(iteration, value):
    layer = {"layer": 0, "head_dim": 8, "figures": {"entropy": [value]}, "alike": [], "spectra": {}}
    return {"iteration": iteration, "tokens": 4, "layers": [layer], "findings": []}


HOLDS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; held = b\"x\" * (64 << 20); {}'])"


def test_the_peak_memory_is_that_of_the_process_itself():
    """By wait4, a process has held what its parent held; this test holds more than the process that it starts."""
    program = HOLDS.format("del held; print(flush=True); time.sleep(60)")
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        launcher.stdout.readline()
        peak = runner._peak_rss(launcher.pid)
        assert 64 * 2**20 < peak < 100 * 2**20 < psutil.Process().memory_info().rss
    finally:
        for process in [*psutil.Process(launcher.pid).children(), launcher]:
            process.kill()
        launcher.wait()
        launcher.stdout.close()
    assert runner._peak_rss(launcher.pid) == 0
