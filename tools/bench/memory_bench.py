"""Memory of a training step as the system sees it, beside what megatron.costs estimates.

    python -m tools.bench.memory_bench [--sizes small middle large] [--precision fp32 bfloat16] [--checkpointed]

Each run is a process of its own, on one CPU thread. It reads its resident memory when everything is imported and set
up, builds the model, makes three steps and reads the peak. The difference also has what the allocator and the code that
runs first take, some tens of MB, so small models look worse than they are.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any, Dict, Optional, Sequence

from rich.console import Console
from rich.table import Table

COMMON: Dict[str, Any] = dict(
    pos_emb="rotary", norm="rmsnorm", activation="swiglu", no_weight_tying=True, use_bias_in_attn_linear=False,
    use_bias_in_mlp=False, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
    distributed_backend="gloo", train_iters=3, optimizer={"type": "adam", "params": {"lr": 1e-4}}, global_num_gpus=1,
    zero_optimization={"stage": 0},
)  # fmt: skip
SIZES: Dict[str, Dict[str, Any]] = {
    "small": dict(
        num_layers=6, hidden_size=384, num_attention_heads=6, num_kv_heads=2, head_dim=96, seq_length=512,
        max_position_embeddings=512, padded_vocab_size=8192, train_micro_batch_size_per_gpu=4,
    ),
    "middle": dict(
        num_layers=8, hidden_size=512, num_attention_heads=8, num_kv_heads=4, head_dim=128, seq_length=1024,
        max_position_embeddings=1024, padded_vocab_size=16384, train_micro_batch_size_per_gpu=2,
    ),
    "large": dict(
        num_layers=10, hidden_size=1024, num_attention_heads=8, num_kv_heads=8, head_dim=64, seq_length=512,
        max_position_embeddings=512, padded_vocab_size=16384, train_micro_batch_size_per_gpu=2,
    ),
}  # fmt: skip
"""The head_dim times heads is more than hidden_size, much more, and half of it."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Freed memory goes back to the system at once, as it does to torch's allocator on a GPU.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark; returns 1 if an estimate is off by more than a tenth."""
    options = parse(arguments)
    if options.run is not None:
        print(json.dumps(run(json.loads(options.run))))
        return 0
    table = Table("size", "precision", "estimate, MB", "measured, MB", "ratio", title="Peak of a training step")
    ratios = []
    for size in options.sizes:
        for precision in options.precision:
            settings = {**COMMON, **SIZES[size], "precision": precision}
            settings["checkpoint_activations"] = options.checkpointed
            found = measured(settings)
            ratios.append(found["estimate"] / found["peak"])
            amounts = (f"{found[key] / 1e6:.0f}" for key in ("estimate", "peak"))
            table.add_row(size, precision, *amounts, f"{ratios[-1]:.3f}")
    Console().print(table)
    return 0 if all(0.9 <= ratio <= 1.1 for ratio in ratios) else 1


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bfloat16"), default=["fp32", "bfloat16"])
    parser.add_argument("--checkpointed", action="store_true", help="with checkpoint_activations")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measured(settings: Dict[str, Any]) -> Dict[str, int]:
    """The run of one model in a fresh process. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "tools.bench.memory_bench", "--run", json.dumps(settings)]
    result = subprocess.run(
        command, cwd=_ROOT, env={**os.environ, **_ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def run(settings: Dict[str, Any]) -> Dict[str, int]:
    """Three steps in this process: bytes estimated, and resident at most beyond those at the start."""
    import torch
    import torch.distributed as dist

    from megatron import costs
    from megatron.initialize import initialize_megatron
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import setup_model_and_optimizer, train_step

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        args = NeoXArgs.from_dict(settings)
        initialize_megatron(args)
        start = _status("VmRSS")
        engine = setup_model_and_optimizer(args)
        engine.train()
        for _ in range(3):
            shape = (args.train_micro_batch_size_per_gpu, args.seq_length + 1)
            train_step(args, engine, iter([{"text": torch.randint(0, args.padded_vocab_size, shape)}]))
        peak = _status("VmHWM") - start
        dist.destroy_process_group()
    return {"estimate": costs.memory_per_rank(args, device="cpu").total, "peak": peak}


def _status(name: str) -> int:
    """Bytes in a field of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
