"""Model parallelism: process groups, sharded layers and the moves between them, under Megatron's names.

The package itself is also what DeepSpeed takes as `mpu`.
"""

from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.fused_linear_cross_entropy import (
    FusedLinearCrossEntropy,
    FusedLossLinear,
    Targets,
    mean_over_tokens,
)
from megatron.mpu.groups import (
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_pipe_parallel_group,
    get_pipe_parallel_rank,
    get_pipe_parallel_world_size,
    get_topology,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from megatron.mpu.init import create_parameter, mark_model_parallel, next_generator, parameter_scope
from megatron.mpu.kv_heads import gather_kv_head
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.mpu.mappings import (
    copy_to_model_parallel_region,
    copy_weight_to_sequence_parallel_region,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.mpu.random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.mpu.utils import current_device, divide, shard, share_sizes, unshard

__all__ = [
    "ColumnParallelLinear",
    "FusedLinearCrossEntropy",
    "FusedLossLinear",
    "RowParallelLinear",
    "Targets",
    "VocabParallelEmbedding",
    "checkpoint",
    "copy_to_model_parallel_region",
    "copy_weight_to_sequence_parallel_region",
    "create_parameter",
    "current_device",
    "destroy_model_parallel",
    "divide",
    "gather_from_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_kv_head",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipe_parallel_group",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_topology",
    "initialize_model_parallel",
    "mark_model_parallel",
    "mean_over_tokens",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "next_generator",
    "parameter_scope",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "shard",
    "share_sizes",
    "unshard",
    "vocab_parallel_cross_entropy",
]
