"""Processes on the CPUs of this machine are started as DeepSpeed's launcher starts them, without importing it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.errors import NeoXError
from megatron.neox_arguments import launcher, local_launch, resources
from tests.helpers.configs import tiny_values

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CHANGED = "RANK LOCAL_RANK WORLD_SIZE DS_ACCELERATOR OMP_NUM_THREADS TORCH_EXTENSIONS_DIR MASTER_ADDR DLTS_HOSTFILE"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model config, one for two processes, and a script to be written."""
    (tmp_path / "model.yml").write_text(json.dumps(tiny_values()))
    (tmp_path / "run.json").write_text(json.dumps({"model-parallel-size": 2}))
    for name in CHANGED.split():
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


WHAT_A_RANK_SEES = """
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
seen = {name: os.environ.get(name) for name in names} | {"arguments": sys.argv[1:]}
open(f"rank{os.environ['RANK']}.json", "w").write(json.dumps(seen))
"""


def seen_by_ranks(folder, monkeypatch, *configs):
    (folder / "script.py").write_text(WHAT_A_RANK_SEES)
    (folder / "port.yml").write_text("master_port: 29500")
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        launcher.launch(["script.py", "model", "run.json", "port", *configs])
    assert not end.value.code
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_processes_on_these_cpus_see_what_deepspeeds_launcher_would_show_them(folder, monkeypatch):
    ours = seen_by_ranks(folder, monkeypatch)
    assert [rank["RANK"] for rank in ours] == ["0", "1"]
    monkeypatch.setattr(launcher, "_is_on_these_cpus", lambda args: False)
    assert seen_by_ranks(folder, monkeypatch) == ours


def test_starting_processes_imports_nothing_heavy(folder):
    (folder / "script.py").write_text("")
    code = (
        "import sys; from megatron.neox_arguments.launcher import launch\n"
        f"try: launch([{str(folder / 'script.py')!r}, {str(folder / 'model')!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'deepspeed', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    for environment in ({"DS_ACCELERATOR": "cpu"}, {}):  # without it, GPUs are looked for
        if not environment and resources._has_gpu_driver():
            continue
        environment = {**{k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"}, **environment}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
        assert run.returncode == 0, run.stderr


def test_a_machine_with_an_nvidia_driver_is_asked_by_torch(monkeypatch):
    import torch

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(resources.ctypes, "CDLL", lambda name: name)
    assert resources.count_gpus() == 3

    def no_such_file(name):
        raise OSError(name)

    monkeypatch.setattr(resources.ctypes, "CDLL", no_such_file)
    assert resources.count_gpus() == (3 if os.path.exists("/dev/kfd") else 0)


def test_a_killed_process_is_named(folder, monkeypatch, capsys):
    (folder / "script.py").write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    with pytest.raises(SystemExit) as end:
        launcher.launch([str(folder / "script.py"), str(folder / "model")])
    assert end.value.code == 128 + signal.SIGKILL and "SIGKILL" in capsys.readouterr().err


def test_when_one_process_fails_the_others_are_ended_and_its_code_counts(folder, monkeypatch):
    """Rank 0 would wait for the other's messages for ever; its end by a signal is not the run's exit code."""
    (folder / "script.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(250)"
    )
    started = time.monotonic()
    assert local_launch.run_local(str(folder / "script.py"), [], 2, 29500) == 7
    assert time.monotonic() - started < 100


def test_a_process_that_does_not_end_is_killed(folder, monkeypatch):
    (folder / "script.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path(sys.argv[2]).touch(); time.sleep(250)\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "sys.exit(3)"
    )
    monkeypatch.setattr(local_launch, "_TIME_TO_END", 0.2)
    assert local_launch.run_local(str(folder / "script.py"), [str(folder / "ready")], 2, 29500) == 3


def test_a_config_too_long_for_a_command_line_is_an_error_not_a_traceback(folder, monkeypatch):
    (folder / "script.py").write_text("")
    monkeypatch.setattr(launcher, "rank_args", lambda args: ["x" * (1 << 22)])
    with pytest.raises(NeoXError, match="could not be started"):
        launcher.launch([str(folder / "script.py"), str(folder / "model")])
