"""malloc's thresholds: set in the programs that compute, and in no other process."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron import allocator

ROOT = Path(__file__).resolve().parents[2]
CPU = {"DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin"}
FREED = """
import ctypes, sys
{before}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

block = libc.malloc(200 << 20)
ctypes.memset(block, 1, 200 << 20)
full = resident()
libc.free(block)
print(full - resident() < 100 << 20)
"""
"""Prints whether 200 MiB stay in the process after they were freed."""
KEEP = "from megatron.allocator import keep_large_blocks; keep_large_blocks()"
IMPORT = "import megatron.allocator, megatron.entry, megatron.neox_arguments"


def keeps(before, **environment):
    run = subprocess.run(
        [sys.executable, "-c", FREED.format(before=before)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**CPU, **environment},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout == "True\n"


pytestmark = pytest.mark.skipif(not allocator._is_glibc(), reason="the C library is not glibc")


def test_freed_blocks_stay_in_the_process():
    assert keeps(KEEP) and not keeps("")


def test_importing_changes_nothing():
    assert not keeps(IMPORT)


@pytest.mark.parametrize(
    "environment",
    [
        {allocator.OFF: "1"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
    ],
)
def test_what_the_user_chose_stays(environment):
    assert not keeps(KEEP, **environment)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "GLIBC_TUNABLES"])
def test_another_allocator_is_left_alone_and_other_settings_do_not_count(monkeypatch, name):
    for variable in ("LD_PRELOAD", "GLIBC_TUNABLES", allocator.OFF):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "/usr/lib/libsomething.so:glibc.cpu.x86_ibt=on")
    assert not allocator._user_chose()
    monkeypatch.setenv(name, "/usr/lib/libjemalloc.so.2:glibc.malloc.check=1")
    assert allocator._user_chose()


def test_only_the_programs_that_compute_ask_for_it():
    mains = [path for path in ROOT.glob("*.py")] + list((ROOT / "tools").rglob("*.py"))
    asking = {path.name for path in mains if "computes=True" in path.read_text()}
    assert asking == {"train.py", "generate.py", "eval.py"}


def test_the_log_says_it(monkeypatch):
    assert allocator.note() is None
    monkeypatch.setattr(allocator, "_kept", True)
    assert "1 GiB" in allocator.note() and allocator.OFF in allocator.note()
