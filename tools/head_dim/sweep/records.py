"""What is kept of each run beside what training itself writes: its settings, how it went, what it took."""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Optional

import yaml

from megatron.errors import ConfigError
from megatron.logging.records import FILE_NAME as LOG
from megatron.logging.records import read_records
from tools.head_dim.sweep.plan import Run

STATE = "state.json"
CONFIG = "config.yml"
FINISHED, DIVERGED, FAILED, UNFINISHED = "finished", "diverged", "failed", "unfinished"
NOT_STARTED = "not started"
DONE = (FINISHED, DIVERGED)
"""Run again, these would end in the same way."""


@dataclass
class State:
    """config, data: what the run is of. Of all attempts together: seconds, and peak_rss_bytes of the largest process, 0
    if unknown. threads: of a process, in each attempt."""

    config: Dict[str, Any]
    data: Dict[str, Any]
    status: str = UNFINISHED
    error: Optional[str] = None
    attempts: int = 0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    threads: List[int] = field(default_factory=list)

    def write(self, out: str, run: Run) -> None:
        """Whole or not at all."""
        path = os.path.join(out, run.folder, STATE)
        with open(f"{path}.writing", "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
        os.replace(f"{path}.writing", path)


def read_state(out: str, run: Run) -> Optional[State]:
    """None for a run that was never started, or of which the state cannot be read."""
    try:
        with open(os.path.join(out, run.folder, STATE), encoding="utf-8") as file:
            return State(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def begin(out: str, run: Run, data: Dict[str, Any], threads: int) -> State:
    """The state of a run that is about to start or go on, with its config in place."""
    folder = os.path.join(out, run.folder)
    state = read_state(out, run)
    if state is None:  # what is there cannot be told to be of this run
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        state = State(config=run.config, data=data)
        with open(os.path.join(folder, CONFIG), "w", encoding="utf-8") as file:
            yaml.safe_dump(run.config, file, sort_keys=False)
    state.status, state.error = UNFINISHED, None
    state.attempts += 1
    state.threads.append(threads)
    state.write(out, run)
    return state


def refuse_changed(out: str, runs: List[Run], data: Dict[str, Any], discard: bool) -> None:
    """Runs that were made with other settings or data are removed with `discard`; else they are a ConfigError."""
    problems = []
    for run in runs:
        state = read_state(out, run)
        changes = [] if state is None else _changes(state, run, data)
        if changes and discard:
            shutil.rmtree(os.path.join(out, run.folder))
        elif changes:
            problems.append(f"{run.name} was trained with other settings: {'; '.join(changes)}")
    if problems:
        raise ConfigError([*problems, "use another --out, or --discard-changed to train these runs anew"])


def _changes(state: State, run: Run, data: Dict[str, Any]) -> List[str]:
    new = json.loads(json.dumps(run.config))  # as it would be read back
    keys = [key for key in {**state.config, **new} if state.config.get(key) != new.get(key)]
    told = [f"{key} was {state.config.get(key)!r}, is {new.get(key)!r}" for key in keys]
    return told + (["the data are others"] if state.data != json.loads(json.dumps(data)) else [])


def log_of(out: str, run: Run) -> List[Dict[str, Any]]:
    """The records of train_log.jsonl; none if there is no log yet."""
    try:
        return read_records(os.path.join(out, run.folder, LOG))
    except (OSError, ValueError):
        return []


def outcome(out: str, run: Run, code: int) -> str:
    """How a run that ended with this exit code went."""
    losses = [record for record in log_of(out, run) if "loss" in record or "valid_loss" in record]
    if losses and losses[-1].get("loss", losses[-1].get("valid_loss")) is None:
        return DIVERGED
    if code:
        return FAILED
    return FINISHED if losses and losses[-1]["iteration"] >= run.variant.train_iters else UNFINISHED
