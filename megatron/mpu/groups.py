"""Process groups of the three parallel dimensions: pipe (outermost in rank order), data, model (innermost).

Until `initialize_model_parallel` is called everything answers as for one process: world sizes 1, ranks 0, no group.
"""

from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch.distributed as dist

from megatron.errors import ConfigError


@dataclass(frozen=True)
class _Axis:
    """This process's group along one dimension."""

    group: Optional[Any] = None
    ranks: Tuple[int, ...] = (0,)
    position: int = 0


_ALONE = _Axis()
_axes: Dict[str, _Axis] = {}
_topology: Optional[Any] = None
_fp32_allreduce = False


def initialize_model_parallel(model_parallel_size: int, topology: Optional[Any] = None, fp32_allreduce: bool = False):
    """Create the groups. torch.distributed must be initialised; every process must make the same call.

    topology: a DeepSpeed ProcessTopology with the axes pipe, data and model; None is model x data without a pipeline.
    fp32_allreduce: sum activations and gradients over the model-parallel group in fp32, whatever their dtype.

    Raises ConfigError if the processes do not fill the topology.
    """
    global _topology, _fp32_allreduce
    world_size = dist.get_world_size()
    if topology is None:
        topology = _model_data_topology(model_parallel_size, world_size)
    if topology.world_size() != world_size or topology.get_dim("model") != model_parallel_size:
        raise ConfigError(
            f"pipe x data x model = {topology.get_dim('pipe')} x {topology.get_dim('data')} x "
            f"{topology.get_dim('model')} does not fit {world_size} processes with "
            f"model_parallel_size={model_parallel_size}"
        )
    _topology = topology
    _fp32_allreduce = fp32_allreduce
    for name in ("pipe", "data", "model"):
        _axes[name] = _create_axis(topology.get_axis_comm_lists(name))


def _model_data_topology(model_parallel_size: int, world_size: int) -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    if world_size % model_parallel_size:
        raise ConfigError(f"{world_size} processes do not divide by model_parallel_size={model_parallel_size}")
    return PipeModelDataParallelTopology(num_pp=1, num_mp=model_parallel_size, num_dp=world_size // model_parallel_size)


def _create_axis(rank_lists) -> _Axis:
    """Every process creates every group, in the same order, as torch.distributed demands; one of them is its own."""
    mine = _ALONE
    for ranks in rank_lists:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = _Axis(group, tuple(ranks), ranks.index(dist.get_rank()))
    return mine


def model_parallel_is_initialized() -> bool:
    """Whether the groups exist."""
    return bool(_axes)


def destroy_model_parallel():
    """Forget the groups, so that `initialize_model_parallel` can be called again."""
    global _topology, _fp32_allreduce
    _axes.clear()
    _topology = None
    _fp32_allreduce = False


def get_topology() -> Optional[Any]:
    """The ProcessTopology in use, None if there is none."""
    return _topology


def get_fp32_allreduce() -> bool:
    """Whether sums over the model-parallel group are made in fp32."""
    return _fp32_allreduce


def get_model_parallel_group():
    """Processes that hold shards of the same layers; None if there is only this one."""
    return _axes.get("model", _ALONE).group


def get_model_parallel_world_size() -> int:
    """Number of shards of each layer."""
    return len(_axes.get("model", _ALONE).ranks)


def get_model_parallel_rank() -> int:
    """Which shard this process holds."""
    return _axes.get("model", _ALONE).position


def get_model_parallel_src_rank() -> int:
    """Global rank of the process that holds shard 0 of this process's layers."""
    return _axes.get("model", _ALONE).ranks[0]


def get_data_parallel_group():
    """Processes that hold the same weights and read different data; None if there is only this one."""
    return _axes.get("data", _ALONE).group


def get_data_parallel_world_size() -> int:
    """Number of replicas of the model."""
    return len(_axes.get("data", _ALONE).ranks)


def get_data_parallel_rank() -> int:
    """Which replica this process belongs to."""
    return _axes.get("data", _ALONE).position


def get_pipe_parallel_group():
    """Processes that hold the stages of one replica of the pipeline; None if there is only this one."""
    return _axes.get("pipe", _ALONE).group


def get_pipe_parallel_world_size() -> int:
    """Number of pipeline stages."""
    return len(_axes.get("pipe", _ALONE).ranks)


def get_pipe_parallel_rank() -> int:
    """Which pipeline stage this process runs."""
    return _axes.get("pipe", _ALONE).position
