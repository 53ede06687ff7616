"""What a model costs: parameters, floating-point operations, KV-cache bytes and memory, all from the geometry."""

from megatron.costs.cache import kv_cache_bytes, kv_cache_bytes_per_token
from megatron.costs.flops import flops_per_token
from megatron.costs.parameters import num_parameters
from megatron.costs.table import geometry_table

__all__ = ["flops_per_token", "geometry_table", "kv_cache_bytes", "kv_cache_bytes_per_token", "num_parameters"]
