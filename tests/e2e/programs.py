"""Run the project's programs as a user does, in a folder of the test's own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]

MODEL = dict(
    num_layers=2,
    hidden_size=40,
    num_attention_heads=6,
    num_kv_heads=2,
    head_dim=12,
    ffn_hidden_size=48,
    activation="swiglu",
    norm="rmsnorm",
    use_qk_layernorm=True,
    pos_emb="rotary",
    seq_length=64,
    max_position_embeddings=64,
    no_weight_tying=True,
    use_bias_in_attn_linear=False,
    use_bias_in_mlp=False,
    attention_config=[[["flash"], 2]],
    data_path="data/pydocs/pydocs_text_document",
    tokenizer_type="HFTokenizer",
    vocab_file="data/pydocs/tokenizer.json",
    data_impl="mmap",
    split="90,10,0",
    num_workers=0,
    train_batch_size=8,
    train_iters=20,
    optimizer={"type": "Adam", "params": {"lr": 4.0e-3, "betas": [0.9, 0.95], "eps": 1.0e-8}},
    min_lr=4.0e-4,
    lr_decay_style="cosine",
    warmup=0.1,
    gradient_clipping=1.0,
    precision="fp32",
    log_interval=1,
    eval_interval=10,
    eval_iters=2,
    distributed_backend="gloo",
)
"""Query width 72 on a residual stream of 40, in the shape of the demo's model; 40 % 6 != 0."""


def run(folder, *command, timeout=200, **options):
    """Run `python command...` in `folder`; returns the finished process with stdout and stderr as text."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


def succeed(folder, *command, **options):
    """As run; a failure of the program fails the test with what it printed."""
    finished = run(folder, *command, **options)
    assert finished.returncode == 0, f"{command}\n{finished.stdout[-3000:]}\n{finished.stderr[-3000:]}"
    return finished


def write_config(folder, name, **settings):
    """Write a YAML file; returns its name."""
    (Path(folder) / name).write_text(yaml.safe_dump(settings))
    return name


def deepy(folder, script, *configs, **options):
    """deepy.py SCRIPT CONFIGS, which must succeed."""
    return succeed(folder, ROOT / "deepy.py", ROOT / script, *configs, **options)


def log_of(folder):
    """The JSON lines of a run's folder."""
    return [json.loads(line) for line in (Path(folder) / "train_log.jsonl").read_text().splitlines()]


def losses_of(folder):
    """{iteration: training loss} of a run's folder."""
    return {line["iteration"]: line["loss"] for line in log_of(folder) if "loss" in line}


def kill_while_saving(folder, *configs, save, timeout=120):
    """Start training and kill every process of it with SIGKILL while a checkpoint is being written."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "deepy.py", ROOT / "train.py", *configs]
    with open(Path(folder) / "killed.log", "w") as log:
        launcher = psutil.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    root = Path(folder) / save
    try:
        _wait_for(lambda: (root / "latest").exists(), launcher, timeout)
        family = launcher.children(recursive=True)  # the ranks first of all, while they are busy with a save
        _wait_for(lambda: list(root.glob(".saving_global_step*")), launcher, timeout)
        for process in reversed(family):
            process.kill()
    finally:
        launcher.kill()
        launcher.wait()


def _wait_for(condition, launcher, timeout):
    deadline = time.monotonic() + timeout
    while not condition():
        assert launcher.poll() is None, f"training ended by itself with exit code {launcher.returncode}"
        assert time.monotonic() < deadline, f"not reached within {timeout} s"
