"""How a script ends on an error that is the user's to fix."""

import os
import signal
import subprocess
import sys
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CODE = """
import signal, sys
import megatron.entry
from megatron.errors import ConfigError

def main():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a trainer that saves on a signal would have it
    print("ready", flush=True)
    print("partial output", end="")
    raise ConfigError(["a=1 is wrong", "b=2 is wrong"])

megatron.entry._WAIT_FOR_RANK_0 = float(sys.argv[1])
megatron.entry.run_main(main)
"""
MESSAGE = "2 problems:\n  1. a=1 is wrong\n  2. b=2 is wrong\n"


def start(wait, **environment):
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(wait)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**kept, **environment},
    )


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_one_process_or_rank_0_prints_at_once(environment):
    process = start(100, **environment)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors, out) == (1, f"error: {MESSAGE}", "ready\npartial output")


def test_another_rank_stays_silent_when_the_launcher_ends_it():
    process = start(100, RANK="1", WORLD_SIZE="2")
    assert process.stdout.readline() == "ready\n"
    while process.poll() is None:  # the first signals may come before the trainer's handler is replaced
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.communicate()[1] == "" and process.returncode == -signal.SIGTERM


def test_another_rank_prints_an_error_of_its_own():
    process = start(0.01, RANK="3", WORLD_SIZE="4")
    assert process.communicate(timeout=60)[1] == f"error (rank 3): {MESSAGE}"
    assert process.returncode == 1


@pytest.mark.parametrize(
    "package, shown", [("torch", "error: the package torch is not installed"), ("nothing", "Traceback")]
)
def test_a_required_package_that_is_missing_is_named(package, shown):
    code = f"""
import megatron.entry

def main():
    raise ModuleNotFoundError("No module named {package!r}", name={package!r})

megatron.entry.run_main(main)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert finished.returncode == 1 and finished.stderr.startswith(shown)


def test_process_groups_are_closed_at_the_end():
    code = """
import torch.distributed as dist
import megatron.entry

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

megatron.entry.run_main(main)
print("open" if dist.is_initialized() else "closed")
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (finished.returncode, finished.stdout) == (0, "closed\n"), finished.stderr


def test_output_that_nobody_reads_any_more_ends_the_program_quietly():
    code = """
import megatron.entry

megatron.entry.run_main(lambda: [print("a line") for _ in range(100_000)])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""
