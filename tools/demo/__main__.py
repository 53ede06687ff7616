"""python -m tools.demo: train a small Qwen3-shaped model on Python's own sources, resume it, generate from it."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = Path("runs/qwen3-tiny-cpu")
ON_THE_CPU = {**os.environ, "DS_ACCELERATOR": "cpu"}
"""The demo is the same everywhere: GPUs are left alone, where there are any."""
CONFIGS = "configs/demo"
MODEL = [f"{CONFIGS}/qwen3-tiny-cpu.yml", f"{CONFIGS}/single.yml"]

STEPS = [
    ("Text, tokenizer and data set", ["prepare_data.py", "pydocs", "-d", "data"]),
    ("Train the first half", ["deepy.py", "train.py", *MODEL, f"{CONFIGS}/first-half.yml"]),
    ("Resume and finish", ["deepy.py", "train.py", *MODEL]),
    ("Generate", ["deepy.py", "generate.py", *MODEL, f"{CONFIGS}/generate.yml"]),
]


def main():
    started = time.monotonic()
    set_aside(ROOT / RUN)
    for number, (title, command) in enumerate(STEPS, 1):
        print(f"\n=== {number}/{len(STEPS)} {title}\n    python {' '.join(command)}", flush=True)
        finished = subprocess.run([sys.executable, *command], cwd=ROOT, env=ON_THE_CPU)
        if finished.returncode:
            print(f"error: step {number} ({title}) stopped with exit code {finished.returncode}", file=sys.stderr)
            return finished.returncode
    report(time.monotonic() - started)
    return 0


def set_aside(run):
    """Keep the newest earlier run under another name, so that this one starts from nothing."""
    if not run.exists():
        return
    previous = run.with_name(run.name + ".previous")
    if previous.exists():
        shutil.rmtree(previous)
    run.rename(previous)
    print(f"The earlier run is kept as {previous.relative_to(ROOT)}")


def report(seconds):
    """Say what was made and where."""
    steps = [json.loads(line) for line in (ROOT / RUN / "train_log.jsonl").read_text().splitlines()]
    losses = [(step["iteration"], step["loss"]) for step in steps if "loss" in step]
    (first, first_loss), (last, last_loss) = losses[0], losses[-1]
    print(f"\n=== Done in {seconds:.0f} s")
    print(f"    loss          {first_loss:.3f} at step {first} -> {last_loss:.3f} at step {last}")
    print(f"    loss curve    {RUN}/loss_curve.png")
    print(f"    log           {RUN}/train_log.jsonl")
    checkpoints = sorted(str(path.relative_to(ROOT)) for path in (ROOT / RUN).glob("global_step*"))
    print(f"    checkpoints   {', '.join(checkpoints)}")
    print(f"    samples       {RUN}/samples.jsonl")


if __name__ == "__main__":
    sys.exit(main())
