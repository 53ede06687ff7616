"""What answers at once must not import what takes seconds."""

import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEAVY = {"torch", "deepspeed", "transformers", "numpy", "matplotlib"}
RUN = f"""
import runpy, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_module(module, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print("heavy:", sorted({HEAVY} & set(sys.modules)))
"""
COMMANDS = {
    "the launcher's help": "deepy --help",
    "the check of a preset": "tools.head_dim verify configs/qwen3/qwen3-4B.yml",
    "the check's help": "tools.head_dim --help",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_heavy_is_imported(name):
    run = subprocess.run(
        [sys.executable, "-c", RUN, *COMMANDS[name].split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("heavy: []\n"), run.stdout[-200:]
