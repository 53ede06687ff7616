"""KV-cache bytes per rank, and the published numbers of models whose caches have been miscounted elsewhere."""

import pytest
import torch

from megatron import costs
from megatron.model.attention.cache import KVCache
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4, MIXED, NARROW, PER_LAYER

_KINDS = ["sliding_attention", "full_attention"] * 2
LAYERS = dict(num_layers=4, sliding_window_width=6, layer_types=_KINDS)
SPLITS = {
    "tp": dict(**GQA_TP4, **LAYERS, model_parallel_size=2),
    "tp_shared_head": dict(**{**NARROW, "num_kv_heads": 1}, **LAYERS, model_parallel_size=2),
    "tp_joint_norm": dict(**GQA_TP4, model_parallel_size=2, use_qk_layernorm=True, norm="rmsnorm"),
    "tp_int8": dict(**GQA_TP4, **LAYERS, model_parallel_size=2, kv_cache_dtype="int8"),
    "tp_widths_by_layer": dict(**PER_LAYER["kv_by_layer"], model_parallel_size=2),
    "tp_widths_by_layer_int8": dict(**PER_LAYER["alternating"], model_parallel_size=2, kv_cache_dtype="int8"),
    "tp_groups_of_heads": dict(**MIXED["gqa"], model_parallel_size=2),
    "tp_groups_of_heads_joint_norm_int8": dict(
        **MIXED["gqa"], model_parallel_size=2, kv_cache_dtype="int8", qk_norm_type="joint", norm="rmsnorm"
    ),
    "pp_widths_by_layer": dict(**PER_LAYER["widening"], pipe_parallel_size=2),
    "pp": dict(
        **GQA_TP4, **{**LAYERS, "num_layers": 3, "layer_types": LAYERS["layer_types"][:3]}, pipe_parallel_size=2
    ),
}


def _allocated(rank, world_size):
    from megatron import mpu
    from megatron.initialize import initialize_megatron

    found = {}
    for name, settings in SPLITS.items():
        args = tiny_args(**settings, global_num_gpus=world_size)
        initialize_megatron(args)
        stage = mpu.get_pipe_parallel_rank() if args.is_pipe_parallel else 0
        found[name] = KVCache(args, costs.stage_layers(args, stage), batch_size=3, max_tokens=20).nbytes
    return found


def test_bytes_of_the_fullest_rank_are_allocated_there(tmp_path):
    ranks = run_distributed(2, _allocated, tmp_path=tmp_path)
    for name, settings in SPLITS.items():
        allocated = [rank[name] for rank in ranks]
        args = tiny_args(**settings, global_num_gpus=2)
        assert max(allocated) == costs.kv_cache_bytes_per_rank(args, 3, 20), name
        assert sum(allocated) == costs.kv_cache_bytes(args, 3, 20), name
    one_head = tiny_args(**SPLITS["tp_shared_head"], global_num_gpus=2)
    assert costs.kv_cache_bytes(one_head, 3, 20) == 2 * (2 * 20 + 2 * 7) * 3 * 2 * 24 * 4  # both ranks, k and v


def _published(layers, hidden, heads, kv_heads, head_dim, **settings):
    return tiny_args(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        **{"precision": "bfloat16", **settings},
    )  # fmt: skip


def test_half_of_the_layers_stop_growing_at_the_window():
    """gpt-oss-120b: 36 layers, every other one with a window of 128 tokens: 73728 bytes a token, then 36864."""
    kinds = ["sliding_attention", "full_attention"] * 18
    args = _published(36, 2880, 64, 8, 64, sliding_window_width=127, layer_types=kinds)

    def growth(tokens):
        return costs.kv_cache_bytes_per_rank(args, 1, tokens + 1) - costs.kv_cache_bytes_per_rank(args, 1, tokens)

    assert [growth(tokens) for tokens in (1, 127, 128, 129, 4000)] == [73728, 73728, 36864, 36864, 36864]
    assert costs.kv_cache_bytes_per_token(args) == 73728
    assert costs.kv_cache_bytes(args, 1, 1000) == 36864 * 1000 + 36864 * 128


@pytest.mark.parametrize("head_dim", [20, 80, 96, 256])
def test_eight_bit_caches_of_any_head_dim_count_their_scales(head_dim):
    """One scale per head and token, whatever head_dim: nothing has to divide by a group of 64."""
    layers, kv_heads, tokens = 3, 2, 7
    for kind, scale in (("int8", 4), ("fp8_e4m3", 0)):
        args = _published(layers, 64, 4, kv_heads, head_dim, kv_cache_dtype=kind)
        expected = tokens * layers * 2 * kv_heads * (head_dim + scale)
        cache = KVCache(args, range(layers), batch_size=1, max_tokens=tokens)
        assert costs.kv_cache_bytes_per_rank(args, 1, tokens) == cache.nbytes == expected
        k = torch.linspace(-3, 3, kv_heads * head_dim).bfloat16().view(1, 1, kv_heads, head_dim)
        stored, _ = cache[0].append(k, k)
        # Half a step of the format: 1/127 of each head's largest, or 1/16 of the number itself.
        error = (stored.float() - k.float()).abs()
        bound = k.float().abs().amax(-1, keepdim=True) / 127 if kind == "int8" else k.float().abs() / 15 + 2**-9
        assert (error <= bound).all()


def test_nemo_caches_its_own_head_dim():
    """Mistral Nemo: 5120 / 32 = 160, but heads of 128."""
    args = _published(40, 5120, 32, 8, 128)
    k = KVCache(args, [0], batch_size=2, max_tokens=5)[0]
    stored, _ = k.append(*torch.zeros(2, 5, 2, 8, 128, dtype=torch.bfloat16))
    assert tuple(stored.shape) == (5, 2, 8, 128)
    assert costs.kv_cache_bytes_per_rank(args, 2, 5) == 40 * k.nbytes == 40 * 5 * 2 * 2 * 8 * 128 * 2
