"""initialize_megatron in processes of its own: plain Python, and ranks as a launcher starts them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch
import torch.distributed as dist
from megatron import mpu
from megatron.initialize import current_device, initialize_megatron, print_rank_0
from tests.helpers.configs import tiny_args

neox_args = tiny_args(**{settings})
initialize_megatron(neox_args)
total = torch.ones(1)
dist.all_reduce(total, group=mpu.get_model_parallel_group())
print_rank_0("first rank speaks")
print(neox_args.rank, neox_args.world_size, neox_args.local_rank, dist.get_backend(), current_device(), int(total))
dist.destroy_process_group()
"""


def _start(tmp_path, settings, **environment):
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    inherited.update(TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"), CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(settings=settings)],
        cwd=ROOT,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _output(process):
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output.splitlines()[-2:], errors


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_plain_python(tmp_path):
    """With no environment at all, and with that of a single rank but no address to meet at."""
    settings = dict(distributed_backend="nccl")
    processes = [_start(tmp_path, settings), _start(tmp_path, settings, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")]
    for process in processes:
        lines, errors = _output(process)
        assert lines == ["first rank speaks", "0 1 0 gloo cpu 1"]
        assert errors.count("distributed_backend=nccl needs GPUs") == 1
    assert not (tmp_path / "extensions").exists(), "something was compiled"


def test_ranks_of_a_launcher(tmp_path):
    environment = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    settings = dict(model_parallel_size=2)
    ranks = [_start(tmp_path, settings, RANK=str(rank), LOCAL_RANK=str(rank), **environment) for rank in range(2)]
    try:
        outputs = [_output(process)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert outputs == [["first rank speaks", "0 2 0 gloo cpu 2"], ["1 2 1 gloo cpu 2"]]
    assert not (tmp_path / "extensions").exists(), "something was compiled"
