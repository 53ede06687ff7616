"""The processes of a run on the CPUs of this machine, started without DeepSpeed's launcher.

That launcher is two programs, one started by the other, and each imports torch and DeepSpeed before it does anything:
ten seconds before the first process of the run begins. What they do on one machine is below.
"""

import os
import subprocess
import sys
import time
from typing import List, Sequence

ADDRESS = "127.0.0.1"
_POLL = 0.1
_TIME_TO_END = 30.0
"""Seconds that a process is given, after another one failed, before it is killed."""


def run_local(script: str, flags: Sequence[str], processes: int, port: int) -> int:
    """Start `python script flags` as so many ranks and wait for them; returns the exit code of the first that failed.

    When one fails, the others are ended. A process that a signal ended gives the negative number of that signal.
    """
    running: List[subprocess.Popen] = []
    try:
        for rank in range(processes):
            running.append(_start(script, flags, rank, processes, port))
    except OSError:
        _end(running)
        raise
    code = 0
    while running and not code:
        ended = [process for process in running if process.poll() is not None]
        running = [process for process in running if process not in ended]
        code = next((process.returncode for process in ended if process.returncode), 0)
        if running and not code:
            time.sleep(_POLL)
    _end(running)
    return code


def _start(script: str, flags: Sequence[str], rank: int, processes: int, port: int) -> subprocess.Popen:
    """The variables and the flag are those of DeepSpeed's launcher."""
    own = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, LOCAL_SIZE=processes, CROSS_RANK=0, CROSS_SIZE=1)
    environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
    environment.update(MASTER_ADDR=ADDRESS, MASTER_PORT=str(port))
    return subprocess.Popen([sys.executable, "-u", script, f"--local_rank={rank}", *flags], env=environment)


def _end(processes: List[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _TIME_TO_END
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
