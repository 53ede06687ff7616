"""What a person sees of a sweep at work: bars on a terminal, lines elsewhere."""

import sys
import time
from typing import Dict, List

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tools.head_dim.sweep import records
from tools.head_dim.sweep.plan import Run
from tools.head_dim.sweep.records import State

REFRESH = 1.0


class View:
    """A bar for all runs, one for each active run with its loss, and a line for each run that ends."""

    def __init__(self, out: str):
        self._out = out
        self._terminal = sys.stdout.isatty()
        self._console = Console(width=None if self._terminal else 140, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._terminal,
            refresh_per_second=2,
        )
        self._tasks: Dict[str, TaskID] = {}
        self._active: List[Run] = []
        self._shown = 0.0

    def __enter__(self) -> "View":
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line, above the bars."""
        self._console.print(text, markup=False)

    def begin(self, runs: List[Run], waiting: List[Run]) -> None:
        """All runs, and those still to do."""
        done = len(runs) - len(waiting)
        self._all = self._bars.add_task("all runs", total=len(runs), completed=done, figures="")
        if done:
            self.say(f"{done} of {len(runs)} runs are done already")

    def started(self, run: Run) -> None:
        """A run begins or goes on."""
        self._active.append(run)
        self._tasks[run.name] = self._bars.add_task(run.name, total=run.variant.train_iters, figures="starting")
        if not self._terminal:
            self.say(f"{run.name}: started")

    def ended(self, run: Run, state: State) -> None:
        """A run ends, whichever way."""
        self._active.remove(run)
        self._bars.remove_task(self._tasks.pop(run.name))
        if state.status in records.DONE:
            self._bars.advance(self._all)
        told = state.error or self._losses(run)
        self.say(f"{run.name}: {state.status}, {state.seconds:.0f} s, {told}")

    def show(self) -> None:
        """How far the active runs are, once a second."""
        if not self._terminal or time.monotonic() - self._shown < REFRESH:
            return
        self._shown = time.monotonic()
        for run in self._active:
            log = records.log_of(self._out, run)
            if log:
                self._bars.update(self._tasks[run.name], completed=log[-1]["iteration"], figures=self._losses(run))

    def _losses(self, run: Run) -> str:
        log = records.log_of(self._out, run)
        told = []
        for key, name in (("loss", "loss"), ("valid_loss", "validation")):
            values = [record[key] for record in log if key in record]
            if values:
                told.append(f"{name} {'not finite' if values[-1] is None else format(values[-1], '.4f')}")
        return ", ".join(told)
