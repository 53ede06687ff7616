"""What a model costs: parameters, floating-point operations, KV-cache bytes and memory, all from the geometry."""

from megatron.costs.cache import kv_cache_bytes, kv_cache_bytes_per_rank, kv_cache_bytes_per_token
from megatron.costs.flops import decode_flops, flops_per_token, forward_flops, keys_per_query
from megatron.costs.memory import MemoryEstimate, memory_of_stage, memory_per_rank
from megatron.costs.parameters import num_parameters, num_trained_parameters, parameter_parts
from megatron.costs.stages import stage_layers
from megatron.costs.table import geometry_table

__all__ = [
    "MemoryEstimate",
    "decode_flops",
    "flops_per_token",
    "forward_flops",
    "geometry_table",
    "keys_per_query",
    "kv_cache_bytes",
    "kv_cache_bytes_per_rank",
    "kv_cache_bytes_per_token",
    "memory_of_stage",
    "memory_per_rank",
    "num_parameters",
    "num_trained_parameters",
    "parameter_parts",
    "stage_layers",
]
