"""Time and memory of conversion, beside `cp` of the same bytes, on a random model.

    python -m tools.bench.convert_bench [--model qwen3-4b] [--layers N] [--tp N] [--pp P] [--dir DIR]

Makes a Hugging Face folder of random bf16 weights, imports it, exports that again, compares every tensor with the
source. Before and after each it copies the source with cp and sync, the mean of which is what a step is compared with,
since a shared disk changes its speed. Each step is a process of its own and starts with nothing waiting to be
written. Anonymous memory is what the process itself holds; peak RSS also counts pages of mapped files, which the system
takes back when it needs them. DIR needs room for three copies.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from rich.console import Console
from rich.table import Table

from megatron.convert.families import FAMILIES
from megatron.convert.hf_source import HFSource
from megatron.convert.hf_writer import HFWriter, write_json
from megatron.convert.rules import write_out
from megatron.neox_arguments import NeoXArgs
from tools.ending import sigterm_as_exit

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
        source = os.path.join(work, "source")
        size, largest = make_model(source, options.model, options.layers)
        steps = [measured(name, command, size) for name, command in commands(work, options)]
        changed = differences(source, os.path.join(work, "exported"))
    show(options, steps, size, largest)
    print(f"tensors that came back changed: {changed or 'none'}")
    return 1 if changed else 0


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a small disk")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
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
    """Print the table, and a JSON line of it."""
    title = (
        f"{options.model}: {size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB; tp {options.tp} pp {options.pp}"
    )
    table = Table("step", "seconds", "CPU s", "GB/s", "x cp", "anonymous peak, MiB", "peak RSS, MiB", title=title)
    for number, step in enumerate(steps):
        around = [other.seconds for other in steps[max(number - 1, 0) : number + 2] if other.name == COPY]
        ratio = f"{step.seconds / (sum(around) / len(around)):.2f}"
        mebibytes = (f"{amount / 2**20:.0f}" for amount in (step.anonymous, step.resident))
        rate = f"{size / step.seconds / 1e9:.2f}"
        table.add_row(step.name, f"{step.seconds:.1f}", f"{step.cpu_seconds:.1f}", rate, ratio, *mebibytes)
    Console().print(table)
    print(json.dumps({"bytes": size, "largest": largest, "steps": [step._asdict() for step in steps]}))


if __name__ == "__main__":
    sys.exit(main())
