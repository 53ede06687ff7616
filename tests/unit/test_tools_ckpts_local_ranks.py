"""Ranks that a tool starts by itself: results, errors, and a rank that is killed."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from megatron.errors import DataError, NeoXError
from tools.ckpts import local_ranks
from tools.ckpts.local_ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]


def summed(value):
    total = torch.tensor([value + torch.distributed.get_rank()])
    torch.distributed.all_reduce(total)
    return total.item() if torch.distributed.get_rank() == 0 else -1


def fails(on_rank):
    if torch.distributed.get_rank() == on_rank:
        raise DataError(f"rank {on_rank} cannot")
    torch.distributed.barrier()  # would wait for ever


def is_killed(on_rank):
    if torch.distributed.get_rank() == on_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Another launcher's variables are there, and are put back."""
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "7"), ("LOCAL_RANK", "5")):
        monkeypatch.setenv(name, value)


def test_results_and_errors():
    assert run_on_ranks(3, summed, 10) == 33
    with pytest.raises(DataError, match="^rank 1 cannot$"):
        run_on_ranks(2, fails, 1)
    with pytest.raises(NeoXError, match="rank 0 was ended from outside .*-9"):
        run_on_ranks(2, is_killed, 0)


FORK = multiprocessing.get_context("fork")
"""For ranks that run nothing but these two functions."""


def ends(results, seconds, error, code):
    faulthandler.disable()  # pytest's, which tells of an abort at length
    time.sleep(seconds)
    if error is not None:
        results.put((None, error))
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


LOST = RuntimeError("rank 1 failed: Connection closed by peer")
MINE = DataError("rank 0 cannot")
REPORTED = local_ranks._REPORTED


@pytest.mark.parametrize(
    "first, kind, message",
    [
        ((None, -signal.SIGKILL), NeoXError, "rank 0 was ended from outside .*-9"),
        ((None, -signal.SIGABRT), NeoXError, "rank 0 was ended from outside .*-6"),
        ((MINE, REPORTED), DataError, "^rank 0 cannot$"),
        (None, RuntimeError, "Connection closed by peer"),
    ],
)
@pytest.mark.parametrize("second", [(LOST, REPORTED), (None, -signal.SIGABRT)])
def test_the_cause_is_reported_and_not_what_came_of_it(first, kind, message, second, monkeypatch):
    """Rank 1 loses its connection, and that is known before rank 0 ends, or is ended, or never ends."""
    monkeypatch.setattr(local_ranks, "_GRACE", 1.0)
    if second[0] is None and kind is not DataError:
        kind, message = NeoXError, "was ended from outside"
    results = FORK.SimpleQueue()
    waiting = (100.0, None, 0) if first is None else (0.3, *first)
    ranks = [FORK.Process(target=ends, args=(results, *each), daemon=True) for each in (waiting, (0.0, *second))]
    try:
        for process in ranks:
            process.start()
        with pytest.raises(kind, match=message):
            local_ranks._first_result(ranks, results)
    finally:
        for process in ranks:
            process.kill()


def test_one_rank_is_this_process():
    assert run_on_ranks(1, os.getpid) == os.getpid()
    assert os.environ["WORLD_SIZE"] == "1"


def sleeps(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(100)


def test_a_tool_that_is_ended_ends_its_ranks(tmp_path):
    program = f"""
        from tests.unit.test_tools_ckpts_local_ranks import sleeps
        from tools.ckpts.local_ranks import run_on_ranks
        if __name__ == "__main__":
            run_on_ranks(2, sleeps, {str(tmp_path)!r})
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], cwd=ROOT, env=environment)
    try:
        limit = time.monotonic() + 60
        while len(ranks := [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]) < 2:
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        for pid in ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        process.kill()
