"""Seconds until something happens: help, a checked preset, the first training step.

    python -m tools.bench.startup_bench [--repeats 5] [--out DIR]

Every command is a process of its own, started through the command line that a user types, all in turn. Below them
stand what Python alone and the import of torch and DeepSpeed take, which no training run can be faster than.
The preset is checked with `tools.head_dim verify`, which needs no torch; `plan`, which says what each kernel of this
machine does with the heads, imports it and takes as long as that does.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, Optional, Sequence

import yaml

from tools.bench.report import Row, Target, bars, parser, report

REPEATS = 5
DEMO = "configs/demo/qwen3-tiny-cpu.yml"
PRESET = "configs/qwen3/qwen3-4B.yml"
FIRST_STEP = "iteration 1/"
"""How the console's line of the first step begins; see megatron/logging/console.py."""
HELP, CHECK, TRAIN = "deepy.py --help", "tools.head_dim verify PRESET", "deepy.py train.py DEMO, first step"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}


class StartError(RuntimeError):
    """A command did not do what it was started for; has the end of its output."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    line = parser(__doc__, "startup")
    line.add_argument("--repeats", type=int, default=REPEATS, help="starts of each; default: %(default)s")
    options = line.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="startup_bench_") as folder:
        found = measure(commands(folder), options.repeats)
    report(
        options.out, "startup", "Start-up", rows(found), targets=targets(found), picture=bars("seconds", "seconds")
    )  # fmt: skip
    return 0


def commands(folder: str) -> Dict[str, List[str]]:
    """What is started, by name."""
    return {
        "python, nothing": ["-c", "pass"],
        HELP: ["deepy.py", "--help"],
        CHECK: ["-m", "tools.head_dim", "verify", PRESET],
        "import torch, deepspeed": ["-c", "import torch, deepspeed"],
        TRAIN: ["deepy.py", "train.py", first_step_config(folder)],
    }


def first_step_config(folder: str) -> str:
    """The demo's config with data made here, stopped after one step; returns its path."""
    from tools.datasets.corpora import Preparation, prepare_dataset

    made = Preparation(data_dir=folder, max_bytes=1_000_000)
    prepare_dataset(made)
    own = dict(data_path=made.data_path, vocab_file=made.tokenizer_file, train_iters=1, log_interval=1, eval_iters=0)
    with open(os.path.join(_ROOT, DEMO), encoding="utf-8") as file:
        demo = yaml.safe_load(file)
    path = os.path.join(folder, "one-step.yml")
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump({**demo, **own}, file)
    return path


def measure(started: Dict[str, List[str]], repeats: int) -> Dict[str, List[float]]:
    """Seconds of every command in turn; a first round, which reads the files from the disk, is left out."""
    found: Dict[str, List[float]] = {name: [] for name in started}
    for _ in range(repeats + 1):
        for name, command in started.items():
            found[name].append(seconds(command, FIRST_STEP if name == TRAIN else None))
    return {name: each[1:] for name, each in found.items()}


def seconds(command: Sequence[str], line: Optional[str] = None) -> float:
    """From the start of a Python process to its end, or to the first line of its output that begins with `line`.

    Raises StartError if it fails or ends without that line.
    """
    start = time.perf_counter()
    seen, output = None, []
    with subprocess.Popen(
        [sys.executable, *command], cwd=_ROOT, env={**os.environ, **_ENVIRONMENT}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        for text in process.stdout:
            output.append(text)
            if line is not None and seen is None and text.startswith(line):
                seen = time.perf_counter() - start
        code = process.wait()
    if code or (line is not None and seen is None):
        wanted = "" if line is None else f" without a line that begins with {line!r}"
        raise StartError(f"{' '.join(command)} ended with exit code {code}{wanted}:\n{''.join(output[-30:])}")
    return time.perf_counter() - start if seen is None else seen


def rows(found: Dict[str, List[float]]) -> List[Row]:
    """The median and the slowest start of each."""
    return [{"command": name, "seconds": statistics.median(each), "slowest": max(each)} for name, each in found.items()]


def targets(found: Dict[str, List[float]]) -> List[Target]:
    """What is wanted."""
    wanted = {HELP: 1.0, CHECK: 1.0, TRAIN: 15.0}
    return [Target(f"seconds, {name}", limit, statistics.median(found[name])) for name, limit in wanted.items()]


if __name__ == "__main__":
    sys.exit(main())
