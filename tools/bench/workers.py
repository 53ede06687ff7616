"""Processes that repeat one piece of work on demand: several are measured in turn, as a machine changes its speed.

A target is a function `package.module:name` that takes settings (what JSON can hold) and returns a callable `step()`,
which does the work once and returns a dict of figures of its own, or None. `python -m tools.bench.workers TARGET` is
the other side: it reads settings and commands on its standard input.
"""

import ctypes
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Mapping, Optional

Figures = Dict[str, Any]
"""What a step took: seconds, cpu_seconds, peak_rss and rss_before (bytes), and what the step returned itself."""

TUNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}
"""An environment in which glibc keeps freed memory for the next step."""

RETURNING_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""An environment in which it gives it back to the system at once, so that resident memory is what is held."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_ERROR_LINES = 30
_PR_SET_PDEATHSIG = 1


class WorkerError(RuntimeError):
    """A worker ended before it had answered; has the end of what it wrote."""


class Worker:
    """A fresh Python process in which `target(settings)` has been called. Close it, or use it as a context manager.

    environment: variables in addition to those of this process. Its output is kept, and shown when it fails.
    `setup_seconds`: from the start of the process until the target had returned, imports included.
    Raises WorkerError if the target fails.
    """

    def __init__(self, target: str, settings: Mapping[str, Any], environment: Optional[Mapping[str, str]] = None):
        self.target = target
        self._output = tempfile.TemporaryFile(mode="w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.workers", target],
            cwd=_ROOT, env={**os.environ, **(environment or {})}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output,
        )  # fmt: skip
        try:
            self.setup_seconds: float = self._ask(settings)["seconds"]
        except BaseException:
            self.close()
            raise

    def step(self) -> Figures:
        """Do the work once. Raises WorkerError if it fails."""
        return self._ask("step")

    def begin(self) -> None:
        """Start a step and do not wait: for workers that work together. Then call `result`."""
        self._send("step")

    def result(self) -> Figures:
        """What the step begun took. Raises WorkerError if it failed."""
        return self._receive()

    def close(self) -> None:
        """End the process; it has nothing to lose."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._output):
            try:
                stream.close()
            except BrokenPipeError:
                pass

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _ask(self, message: Any) -> Figures:
        self._send(message)
        return self._receive()

    def _send(self, message: Any) -> None:
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which `_receive` reports

    def _receive(self) -> Figures:
        answer = self._process.stdout.readline()
        if not answer:
            self._output.seek(0)
            end = "".join(self._output.readlines()[-_ERROR_LINES:])
            raise WorkerError(f"{self.target} ended with exit code {self._process.wait()}:\n{end}")
        return json.loads(answer)


def interleaved(workers: Mapping[str, Worker], repeats: int = 5, warmup: int = 1) -> Dict[str, List[Figures]]:
    """Steps of every worker in turn, A B C A B C; those of the first `warmup` rounds are not in the result."""
    rounds = [{name: worker.step() for name, worker in workers.items()} for _ in range(warmup + repeats)]
    return {name: [each[name] for each in rounds[warmup:]] for name in workers}


def median(figures: List[Figures], name: str = "seconds") -> float:
    """The median of one figure over the steps."""
    return statistics.median(each[name] for each in figures)


def median_ratio(figures: List[Figures], others: List[Figures], name: str = "seconds") -> float:
    """The median over the rounds of figure / other's figure in the same round: drift of the machine cancels."""
    return statistics.median(a[name] / b[name] for a, b in zip(figures, others, strict=True))


def measured(step: Callable[[], Optional[Figures]]) -> Figures:
    """One step in this process. Its peak is that of the step alone, on Linux; elsewhere the figures of memory are 0."""
    _forget_peak()
    before = memory("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    own = step()
    figures = dict(seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu)
    return {**figures, "rss_before": before, "peak_rss": memory("VmHWM"), **(own or {})}


def memory(name: str) -> int:
    """Bytes in a field of /proc/self/status: VmRSS is what is resident now, VmHWM the most since it was forgotten."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))
    except OSError:
        return 0


def _forget_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def _end_with_parent() -> None:
    """On Linux, be ended when the process that started this one is, even by a signal which it cannot handle."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(target: str) -> None:
    """Answer on what was the standard output, which then belongs to nobody else: libraries print."""
    start = time.perf_counter()
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, name = target.split(":")
    step = getattr(importlib.import_module(module), name)(json.loads(sys.stdin.readline()))
    answer: Figures = dict(seconds=time.perf_counter() - start)
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        if not sys.stdin.readline():
            return
        answer = measured(step)


if __name__ == "__main__":
    serve(sys.argv[1])
