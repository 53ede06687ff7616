"""The small models of the scaling study: series in which one thing changes, by name."""

from typing import Any, Dict, Tuple

from tools.bench.shapes import settings

Arguments = Dict[str, Any]

SMALL: Dict[str, Any] = dict(
    num_layers=4, hidden_size=256, num_attention_heads=4, num_kv_heads=2, head_dim=64, ffn_hidden_size=768,
    padded_vocab_size=4096, no_weight_tying=True,
)  # fmt: skip
LENGTHS = (256, 512, 1024, 2048, 4096)
LAYERS = (2, 4, 8, 16)
TOKENS = 4096
"""In a step, at every length."""

SAME_WIDTH = {64: (8, 4), 128: (4, 2), 256: (2, 1)}
"""head_dim: (query heads, key/value heads), of one width together: equal parameters and FLOPs."""
SAME_HEADS = {64: 2048, 128: 1536, 256: 512}
"""head_dim: MLP width that leaves the parameters equal with 8 query and 4 key/value heads."""
KERNELS = ("chunked", "global")

WIDE: Dict[str, Any] = dict(
    num_layers=6, hidden_size=512, num_attention_heads=8, num_kv_heads=4, head_dim=64, ffn_hidden_size=1536,
    padded_vocab_size=8192,
)  # fmt: skip
"""For several ranks: enough work and enough weights."""

DECODED: Dict[str, int] = dict(batch=4, prompt=960, new=33)
"""Texts, and tokens of each: long prompts, so that the cache matters."""


def small(seq_length: int, tokens: int = TOKENS, precision: str = "fp32", **changes: Any) -> Arguments:
    """Arguments of the small model, with as many texts in a step as make `tokens`."""
    shape = {**SMALL, "seq_length": seq_length, "max_position_embeddings": max(LENGTHS), **changes}
    return settings(shape, train_micro_batch_size_per_gpu=max(1, tokens // seq_length), precision=precision)


def lengths() -> Dict[str, Arguments]:
    """The same tokens, cut into texts of every length."""
    return {str(length): small(length) for length in LENGTHS}


def depths() -> Dict[str, Arguments]:
    """Models of every number of layers."""
    return {str(layers): small(512, 2048, num_layers=layers) for layers in LAYERS}


def same_width(**changes: Any) -> Dict[str, Arguments]:
    """head_dim at one query width: fewer, wider heads."""
    return {
        str(width): small(
            1024, 1024, **{"head_dim": width, "num_attention_heads": heads, "num_kv_heads": kv_heads, **changes}
        )
        for width, (heads, kv_heads) in SAME_WIDTH.items()
    }


def same_heads(**changes: Any) -> Dict[str, Arguments]:
    """head_dim at one number of heads: a wider attention, paid for by the MLP."""
    return {
        str(width): small(
            1024, 1024,
            **{"head_dim": width, "num_attention_heads": 8, "num_kv_heads": 4, "ffn_hidden_size": ffn, **changes},
        )
        for width, ffn in SAME_HEADS.items()
    }  # fmt: skip


def head_dims() -> Dict[str, Arguments]:
    """Both, with every kernel: `same width, chunked, 64`."""
    return {
        f"{kind}, {kernel}, {width}": arguments
        for kind, make in (("same width", same_width), ("same heads", same_heads))
        for kernel in KERNELS
        for width, arguments in make(attention_config=[[[kernel], SMALL["num_layers"]]]).items()
    }


def decoders() -> Dict[str, Arguments]:
    """head_dim of both kinds, each with a cache in the weights' bfloat16 and in int8: `same width, 64, int8`."""
    return {
        f"{kind}, {width}, {name}": {**arguments, "precision": "bfloat16", "kv_cache_dtype": dtype}
        for kind, make in (("same width", same_width), ("same heads", same_heads))
        for width, arguments in make().items()
        for name, dtype in (("bfloat16", None), ("int8", "int8"))
    }


def layouts() -> Dict[str, Tuple[Arguments, int, int]]:
    """One model on (arguments, processes, threads of each)."""
    one = small(512, 1024, **WIDE)
    return {
        "1 process, 1 thread": (one, 1, 1),
        "1 process, 2 threads": (one, 1, 2),
        "TP 2, 1 thread each": ({**one, "model_parallel_size": 2, "global_num_gpus": 2}, 2, 1),
        "DP 2, 1 thread each": (
            {**one, "train_micro_batch_size_per_gpu": one["train_micro_batch_size_per_gpu"] // 2, "global_num_gpus": 2},
            2,
            1,
        ),
    }


def zero_stages() -> Dict[str, Arguments]:
    """Every stage of ZeRO on two ranks, in both precisions: `bfloat16, stage 1`.

    Buckets as small as the model: the estimate counts them whole, and of DeepSpeed's own, of 500 million numbers, a
    small model never touches most.
    """
    buckets = dict(reduce_bucket_size=2_000_000, allgather_bucket_size=2_000_000)
    fetched = dict(
        stage3_max_live_parameters=4_000_000, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=1_000_000
    )
    zero = {0: {}, 1: buckets, 2: buckets, 3: {**buckets, **fetched}}
    return {
        f"{precision}, stage {stage}": small(
            256, 256, precision, **WIDE, zero_optimization={"stage": stage, **own}, global_num_gpus=2
        )
        for precision in ("bfloat16", "fp32")
        for stage, own in zero.items()
    }
