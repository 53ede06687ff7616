"""Time and memory of conversion, beside `cp` of the same bytes, on a random model.

    python -m tools.bench.convert_bench [--model qwen3-4b] [--layers N] [--tp N] [--pp P] [--repeats N] [--dir DIR]

Makes a Hugging Face folder of random bf16 weights; imports it and exports that again, --repeats times; compares every
tensor with the source. Before and after each it copies the source with cp and sync, the mean of which is what a step is
compared with, since a shared disk changes its speed; of the ratios the median is given. Each step is a process of its
own and starts with nothing waiting to be written. Memory of its own is what the process holds; peak RSS also counts
pages of mapped files, which the system takes back when it needs them. DIR needs room for three copies.
"""

import argparse
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from megatron.convert.families import FAMILIES
from megatron.convert.hf_source import HFSource
from megatron.convert.hf_writer import HFWriter, write_json
from megatron.convert.rules import write_out
from megatron.neox_arguments import NeoXArgs
from tools.bench import report
from tools.ending import sigterm_as_exit
from tools.options import at_least

COMMON = dict(vocab_size=151936, rope_theta=1e6, rms_norm_eps=1e-6, max_position_embeddings=40960)
MODELS = {
    "qwen3-0.6b": dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, intermediate_size=3072
    ),
    "qwen3-4b": dict(
        hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, intermediate_size=9728
    ),
}
"""Tied, with heads of 128."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_POLL_SECONDS = 0.01
COPY = "cp and sync"
NAME = "convert"
MOST_RATIO = 1.5
"""Wanted, beside the copies; of a whole qwen3-4b, whose 8 GB outweigh the start of Python."""
LEAST_LIMIT = 3 << 29
"""Memory of its own that is allowed in any case: 1.5 GiB. Else three times the largest tensor."""


class Step(NamedTuple):
    """What one process took."""

    name: str
    seconds: float
    cpu_seconds: float
    anonymous: int
    resident: int


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark; returns 1 if a tensor came back changed."""
    options = parse(arguments)
    with sigterm_as_exit(), tempfile.TemporaryDirectory(prefix="convert_bench_", dir=options.dir) as work:
        source, exported = os.path.join(work, "source"), os.path.join(work, "exported")
        size, largest = make_model(source, options.model, options.layers)
        steps: List[Step] = []
        for number in range(options.repeats):
            for folder in (exported, os.path.join(work, "imported")):
                shutil.rmtree(folder, ignore_errors=True)
            steps += [measured(name, command, size) for name, command in commands(work, options)[number > 0 :]]
        changed = differences(source, exported)
    show(options, steps, size, largest)
    print(f"tensors that came back changed: {changed or 'none'}")
    return 1 if changed else 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = report.parser(__doc__, NAME)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--layers", type=at_least(1), help="fewer than the model has, for a small disk")
    parser.add_argument("--tp", type=at_least(1), default=1)
    parser.add_argument("--pp", type=at_least(0), default=1)
    parser.add_argument("--repeats", type=at_least(1), default=1)
    parser.add_argument("--dir", help="on the disk to measure; by default the system's folder for temporary files")
    return parser.parse_args(arguments)


def make_model(folder: str, name: str, layers: Optional[int]) -> Tuple[int, int]:
    """A folder of random weights; returns (bytes, bytes of the largest tensor)."""
    config: Dict[str, Any] = {**COMMON, **MODELS[name], "model_type": "qwen3", "head_dim": 128}
    config.update(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True, hidden_act="silu", dtype="bfloat16")
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    os.makedirs(folder)
    write_json(os.path.join(folder, "config.json"), config)
    tensors = [(each, shape, torch.bfloat16) for each, shape in _tensors(folder)]
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    with HFWriter(folder, tensors) as writer:
        for number, (each, shape, _) in enumerate(tensors):
            count = torch.Size(shape).numel()
            values = noise.roll(number).repeat(-(-count // len(noise)))[:count]
            writer.write(each, values.view(shape))
    sizes = [torch.Size(shape).numel() * 2 for _, shape, _ in tensors]
    return sum(sizes), max(sizes)


def _tensors(folder: str) -> List[Tuple[str, Tuple[int, ...]]]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    family = FAMILIES[config.model_type]
    settings = {**family.settings(config), "padded_vocab_size": config.vocab_size}
    args = NeoXArgs.from_dict({**settings, "train_micro_batch_size_per_gpu": 1, "global_num_gpus": 1})
    lines = write_out(family.rules(args), args, config.vocab_size)
    return [pair for line in lines for pair in zip(line.theirs, line.shapes, strict=True)]


def commands(work: str, options: argparse.Namespace) -> List[Tuple[str, List[str]]]:
    """The steps, in order."""
    source, imported, exported, copy = (os.path.join(work, x) for x in ("source", "imported", "exported", "copy"))
    tools = os.path.join(_ROOT, "tools", "ckpts")
    to_neox = [sys.executable, os.path.join(tools, "convert_hf_to_neox.py"), "--input_dir", source]
    to_neox += ["--output_dir", imported, "--tp", str(options.tp), "--pp", str(options.pp)]
    to_hf = [sys.executable, os.path.join(tools, "convert_neox_to_hf.py"), "--input_dir", imported]
    to_hf += ["--output_dir", exported, "--max-shard-bytes", "2000000000"]
    copied = ["sh", "-c", f"cp -r '{source}' '{copy}' && sync '{copy}'/*; status=$?; rm -r '{copy}'; exit $status"]
    copying = (COPY, copied)
    return [copying, ("import", to_neox), copying, ("export", to_hf), copying]


def measured(name: str, command: List[str], size: int) -> Step:
    """Run a command that writes `size` bytes, and watch its memory. Raises CalledProcessError if it fails."""
    os.sync()
    touch_memory(size)
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=_ROOT, start_new_session=True)
    anonymous = resident = 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        while process.poll() is None:
            status = _memory(process.pid)
            anonymous, resident = max(anonymous, status.get("RssAnon", 0)), max(resident, status.get("VmHWM", 0))
            time.sleep(_POLL_SECONDS)
    finally:
        if process.poll() is None:  # this one is being ended, and its folder removed
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Step(name, seconds, cpu, anonymous, resident)


def touch_memory(size: int) -> None:
    """Leave that much memory free and in use before: in a virtual machine, pages new to it cost ten times the time."""
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    count = min(size, available // 2)
    subprocess.run([sys.executable, "-c", f"b'x' * {count}"], check=True)


def _memory(pid: int) -> Dict[str, int]:
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = (line.split() for line in file if line.startswith(("RssAnon", "VmHWM")))
            return {key.rstrip(":"): int(value) * 1024 for key, value, _ in fields}
    except (OSError, ValueError):
        return {}


def differences(first: str, second: str) -> List[str]:
    """Names of the tensors that are not equal, in shape, dtype and every bit."""
    a, b = HFSource(first), HFSource(second)
    if a.names() != b.names():
        return sorted(set(a.names()) ^ set(b.names()))
    return [name for name in a.names() if a.dtype(name) != b.dtype(name) or not torch.equal(a.read(name), b.read(name))]


def show(options: argparse.Namespace, steps: List[Step], size: int, largest: int) -> None:
    """Print the table, and write it."""
    rows = [row(name, steps) for name in (COPY, "import", "export")]
    layers = f", {options.layers} layers" if options.layers else ""
    title = f"{options.model}{layers}: {size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB"
    report.report(
        options.out,
        NAME,
        f"{title}; tp {options.tp} pp {options.pp}",
        rows,
        targets=targets(rows[1:], options, largest),
        picture=report.bars("x cp", "time beside cp of the same bytes", limit=MOST_RATIO),
        bytes=size,
        largest=largest,
        steps=[step._asdict() for step in steps],
    )


def row(name: str, steps: List[Step]) -> report.Row:
    """Medians of all runs of one step; memory: the most."""
    mine = [step for step in steps if step.name == name]
    return {
        "step": name,
        "runs": len(mine),
        "seconds": statistics.median(step.seconds for step in mine),
        "from": min(step.seconds for step in mine),
        "to": max(step.seconds for step in mine),
        "CPU seconds": statistics.median(step.cpu_seconds for step in mine),
        "x cp": statistics.median(ratios(name, steps)),
        "own memory, MiB": max(step.anonymous for step in mine) / 2**20,
        "peak RSS, MiB": max(step.resident for step in mine) / 2**20,
    }


def ratios(name: str, steps: List[Step]) -> List[float]:
    """Of each run of a step to the mean of the copies just before and after it; a copy counts as its own."""
    found = []
    for number, step in enumerate(steps):
        around = [other.seconds for other in steps[max(number - 1, 0) : number + 2] if other.name == COPY]
        found += [step.seconds / statistics.mean(around)] if step.name == name else []
    return found


def targets(rows: List[report.Row], options: argparse.Namespace, largest: int) -> List[report.Target]:
    """Time of a whole model only."""
    whole, most = options.model == "qwen3-4b" and not options.layers, max(LEAST_LIMIT, 3 * largest) / 2**20
    return [
        each
        for line in rows
        for each in (
            report.Target(f"{line['step']}: x cp", MOST_RATIO, line["x cp"] if whole else None),
            report.Target(f"{line['step']}: memory of its own, MiB", most, line["own memory, MiB"]),
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
