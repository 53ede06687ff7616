"""Tools that are told to end (SIGTERM) remove what they had begun to write, and end what they had started."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.helpers.convert_folders import run_import, saved

ROOT = Path(__file__).resolve().parents[2]

CONVERSION = """
    import sys, time
    from megatron.{module} import {writer}
    from tools.ckpts import {tool}

    original = {writer}.{method}

    def slow(self, *arguments):
        original(self, *arguments)
        open({ready!r}, "w").close()
        time.sleep(100)

    {writer}.{method} = slow
    sys.exit({tool}.main(["--input_dir", {source!r}, "--output_dir", {out!r}]))
"""

BENCHMARK = """
    import os, sys
    from tools.bench import convert_bench

    def make_model(folder, *_):
        os.makedirs(folder)
        return 10, 10

    convert_bench.make_model = make_model
    convert_bench.commands = lambda work, options: [("sleep", ["sh", "-c", "sleep 101 & echo $! > {ready}; wait"])]
    sys.exit(convert_bench.main(["--dir", {out!r}]))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """{name: (process, the file that says it is in the middle, the folder it writes to)}; they start side by side."""
    root = tmp_path_factory.mktemp("tools")
    source = saved(root / "hf")
    ours = run_import(source, root / "ours")
    (root / "bench").mkdir()
    texts = {
        "import": (
            CONVERSION,
            dict(
                module="checkpointing.streamed_file",
                writer="StreamedFile",
                method="add",
                tool="convert_hf_to_neox",
                source=source,
            ),
        ),
        "export": (
            CONVERSION,
            dict(module="convert.hf_writer", writer="HFWriter", method="write", tool="convert_neox_to_hf", source=ours),
        ),
        "bench": (BENCHMARK, {}),
    }
    started = {}
    for name, (text, values) in texts.items():
        ready, out = root / f"{name}.ready", root / name
        (root / f"{name}.py").write_text(textwrap.dedent(text).format(ready=str(ready), out=str(out), **values))
        command = [sys.executable, str(root / f"{name}.py")]
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        started[name] = (process, ready, out)
    yield started
    for process, _, _ in started.values():
        process.kill()


def _ended(process, ready):
    limit = time.monotonic() + 120
    while not ready.exists():
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.1)
    process.terminate()
    return process.wait(timeout=30)


@pytest.mark.parametrize("name", ["import", "export"])
def test_a_conversion(programs, name):
    process, ready, out = programs[name]
    assert _ended(process, ready) == 128 + signal.SIGTERM
    assert not [each for each in os.listdir(out.parent) if each.startswith(f"{name}.unf") or each == name]


def test_the_benchmark(programs):
    process, ready, out = programs["bench"]
    assert _ended(process, ready) == 128 + signal.SIGTERM
    assert os.listdir(out) == []
    with pytest.raises(ProcessLookupError):  # what it had started, and what that had started
        for _ in range(100):
            os.kill(int(ready.read_text()), 0)
            time.sleep(0.05)
