"""Runs a study's runs through the launcher, some at a time. What is finished is kept, what is half done goes on."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List

import psutil

from megatron.errors import ConfigError
from tools.head_dim.sweep import records
from tools.head_dim.sweep.plan import Run
from tools.head_dim.sweep.progress import View
from tools.head_dim.sweep.records import State

ROOT = Path(__file__).resolve().parents[3]
OUTPUT = "output.txt"
LOCK = "lock"
POLL = 0.1
MEMORY_POLL = 0.5
TIME_TO_SAVE = 60.0
"""Seconds that a run is given, after it was told to stop, to write its checkpoint."""


@dataclass
class _Active:
    run: Run
    state: State
    process: subprocess.Popen
    started: float
    looked: float = 0.0


def execute(out: str, runs: List[Run], data: Dict[str, Any], jobs: int, keep_checkpoints: bool, view: View) -> None:
    """Run what is not done yet, `jobs` at a time.

    A run that fails is recorded, and the others go on. An interrupt tells the active runs to stop, waits until they
    have saved a checkpoint, and is passed on.
    """
    with locked(out) as lock:
        waiting = [run for run in runs if not _is_done(out, run)]
        view.begin(runs, waiting)
        active: List[_Active] = []
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    run = waiting.pop(0)
                    active.append(_start(out, run, data, jobs, lock))
                    view.started(run)
                time.sleep(POLL)
                for each in list(active):
                    if _has_ended(out, each, keep_checkpoints):
                        active.remove(each)
                        view.ended(each.run, each.state)
                view.show()
        finally:
            _stop(out, active, keep_checkpoints)


@contextlib.contextmanager
def locked(out: str) -> Iterator[int]:
    """Only one sweep works in a folder. Its runs hold the lock too: killed, it can leave them behind at work.

    Raises ConfigError.
    """
    os.makedirs(out, exist_ok=True)
    file = os.open(os.path.join(out, LOCK), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    except BlockingIOError:
        raise ConfigError(
            f"--out {out}: a sweep, or runs that an ended sweep has left behind, are at work there; wait until they end"
        ) from None
    finally:
        os.close(file)


def threads(jobs: int, processes: int) -> int:
    """Of each process: an equal share of the cores that this one may use."""
    return max(1, len(os.sched_getaffinity(0)) // (jobs * processes))


def _is_done(out: str, run: Run) -> bool:
    state = records.read_state(out, run)
    return state is not None and state.status in records.DONE


def _start(out: str, run: Run, data: Dict[str, Any], jobs: int, lock: int) -> _Active:
    """Through deepy.py, in the sweep's folder, to which the run's paths are relative."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    environment.setdefault("OMP_NUM_THREADS", str(threads(jobs, run.variant.processes)))
    state = records.begin(out, run, data, threads=int(environment["OMP_NUM_THREADS"]))
    config = os.path.join(run.folder, records.CONFIG)
    with open(os.path.join(out, run.folder, OUTPUT), "ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py"), config],
            cwd=out,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt from the keyboard reaches it through the sweep, and once
            pass_fds=[lock],
        )
    return _Active(run, state, process, time.monotonic())


def _has_ended(out: str, active: _Active, keep_checkpoints: bool) -> bool:
    """Whether it has; then its state is written."""
    process, state = active.process, active.state
    if process.poll() is None:
        if time.monotonic() - active.looked > MEMORY_POLL:
            active.looked = time.monotonic()
            state.peak_rss_bytes = max(state.peak_rss_bytes, _peak_rss(process.pid))
        return False
    state.seconds += time.monotonic() - active.started
    state.status = records.outcome(out, active.run, process.returncode)
    if state.status == records.FAILED:
        state.error = _last_words(os.path.join(out, active.run.folder, OUTPUT), process.returncode)
    state.write(out, active.run)
    if state.status in records.DONE and not keep_checkpoints:
        shutil.rmtree(os.path.join(out, active.run.config["save"]), ignore_errors=True)
    return True


def _peak_rss(launcher: int) -> int:
    """The most that the largest process of a run has held so far, in bytes; 0 where the system does not say.

    Not what wait4 tells of a process that has ended: that is never less than what its parent held.
    """
    peaks = [0]
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/status") as file:
                peaks += [int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")]
    return max(peaks)


def _last_words(path: str, code: int) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    told = [line for line in lines if line.startswith("error")] or lines
    return f"{told[-1] if told else 'it said nothing'} (exit code {code}, see {os.path.basename(path)})"


def _stop(out: str, active: List[_Active], keep_checkpoints: bool) -> None:
    """The launcher passes the signal on; the runs save and end."""
    for each in active:
        with contextlib.suppress(ProcessLookupError):
            each.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + TIME_TO_SAVE
    while active and time.monotonic() < deadline:
        active = [each for each in active if not _has_ended(out, each, keep_checkpoints)]
        time.sleep(POLL)
    for each in active:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
