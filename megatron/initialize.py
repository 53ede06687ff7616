"""Start of a process: torch.distributed, DeepSpeed's communication, process groups, seeds, activation checkpointing."""

import os
import random
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.errors import ConfigError
from megatron.mpu import current_device

__all__ = ["current_device", "initialize_megatron", "print_rank_0"]


def initialize_megatron(neox_args) -> None:
    """Make this process a rank of the run that `neox_args` describes, and write its rank and world_size there.

    Works for ranks started by a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment), for one
    process started as plain Python, and where torch.distributed is initialised already; it can be called again.

    Raises ConfigError if the number of processes does not fit the parallel sizes or the batch sizes.
    """
    _initialize_distributed(neox_args)
    _initialize_groups(neox_args)
    _configure_activation_checkpointing(neox_args)
    _set_seeds(neox_args.seed)


def print_rank_0(*values: Any) -> None:
    """Print on the first rank only, or if there is one process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*values, flush=True)


def _initialize_distributed(neox_args) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed would compile this CPU communication kernel at start: minutes of work and a lock file that a killed
    # build leaves behind for every later start to wait on. gloo does the same sums.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = _backend(neox_args.distributed_backend)
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 or neox_args.deepspeed_mpi
    if current_device().type != "cpu":
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized() and not launched:
        # No address, no port: nothing that another run on this machine could be using.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed's engine insists on it
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=launched and not dist.is_initialized(),
        distributed_port=neox_args.master_port,
        verbose=False,
    )
    neox_args.rank = dist.get_rank()
    neox_args.world_size = dist.get_world_size()
    neox_args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))


def _backend(configured: str) -> str:
    """nccl needs GPUs; its being the default must not keep a run off the CPU."""
    if current_device().type == "cuda" or configured != "nccl":
        return configured
    if int(os.environ.get("RANK", "0")) == 0:
        warnings.warn("distributed_backend=nccl needs GPUs and there are none: using gloo", stacklevel=2)
    return "gloo"


def _initialize_groups(neox_args) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    pipe, model = max(neox_args.pipe_parallel_size, 1), neox_args.model_parallel_size
    world_size = dist.get_world_size()
    if world_size % (pipe * model):
        raise ConfigError(
            f"{world_size} processes cannot hold pipe_parallel_size={pipe} x model_parallel_size={model}: start a "
            f"multiple of {pipe * model} processes, through deepy.py"
        )
    data = world_size // (pipe * model)
    _check_batch(neox_args, data)
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data)
    mpu.initialize_model_parallel(model, topology=topology, fp32_allreduce=neox_args.fp32_allreduce)


def _check_batch(neox_args, data_parallel_size: int) -> None:
    """The batch sizes were derived from a number of GPUs; hold them against the number of processes there are."""
    sizes = (
        neox_args.train_batch_size,
        neox_args.train_micro_batch_size_per_gpu,
        neox_args.gradient_accumulation_steps,
    )
    if None in sizes or sizes[0] == sizes[1] * sizes[2] * data_parallel_size:
        return
    raise ConfigError(
        f"train_batch_size={sizes[0]} is not train_micro_batch_size_per_gpu={sizes[1]} x "
        f"gradient_accumulation_steps={sizes[2]} x {data_parallel_size} model replicas: the run has "
        f"{dist.get_world_size()} processes, the config was made for global_num_gpus={neox_args.global_num_gpus}; "
        "start it through deepy.py or set global_num_gpus"
    )


def _configure_activation_checkpointing(neox_args) -> None:
    import deepspeed

    enabled = neox_args.checkpoint_activations
    deepspeed.checkpointing.configure(
        mpu,
        partition_activations=enabled and neox_args.partition_activations,
        contiguous_checkpointing=enabled and neox_args.contiguous_checkpointing,
        num_checkpoints=-(-neox_args.num_layers // neox_args.checkpoint_num_layers),
        checkpoint_in_cpu=enabled and neox_args.checkpoint_in_cpu,
        synchronize=enabled and neox_args.synchronize_each_layer,
        profile=enabled and neox_args.profile_backward,
    )


def _set_seeds(seed: int) -> None:
    """Seed everything random but the initial weights, which have generators of their own (megatron.mpu.init).

    Model-parallel ranks of one replica and stage share the seed, because they must drop the same replicated
    activations; replicas and stages differ. DeepSpeed adds the model-parallel rank for its tracker's state, so
    steps of model_parallel_size keep those apart too.
    """
    place = mpu.get_pipe_parallel_rank() * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank()
    seed += place * mpu.get_model_parallel_world_size()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    mpu.model_parallel_cuda_manual_seed(seed)
