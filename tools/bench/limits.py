"""What the machine could do at best, as workers: a step's bare matrix products, and copying memory."""

import time
from typing import Any, Callable, Dict, List, Tuple

import torch

COPIED_BYTES = 256 << 20


def linears(settings: Dict[str, Any]) -> List[Tuple[int, int]]:
    """(out, in) of every matrix of a Qwen3-style model in our keys: fused QKV, dense, fused gate and up, down; head."""
    hidden, ffn, d = (settings[name] for name in ("hidden_size", "ffn_hidden_size", "head_dim"))
    heads, kv_heads = settings["num_attention_heads"], settings["num_kv_heads"]
    layer = [((heads + 2 * kv_heads) * d, hidden), (hidden, heads * d), (2 * ffn, hidden), (hidden, ffn)]
    return layer * settings["num_layers"] + [(settings["padded_vocab_size"], hidden)]


def matrix_products(settings: Dict[str, Any]) -> Callable[[], None]:
    """A worker: x @ w.t(), g @ w and g.t() @ x of every linear, each with weights of its own; results are dropped."""
    dtype = torch.bfloat16 if settings["precision"] == "bfloat16" else torch.float32
    tokens = settings["train_micro_batch_size_per_gpu"] * settings["seq_length"]
    sizes = linears(settings)
    weights = [torch.randn(size, dtype=dtype) for size in sizes]
    rows = {width: torch.randn(tokens, width, dtype=dtype) for size in sizes for width in size}

    def step() -> None:
        for weight in weights:
            gradient, activation = (rows[width] for width in weight.shape)
            activation @ weight.t()
            gradient @ weight
            gradient.t() @ activation

    return step


def copy_bandwidth(settings: Dict[str, Any]) -> Callable[[], Dict[str, float]]:
    """A worker: copies settings["bytes"] (default: 256 MiB, more than a cache), and says bytes_per_second, each byte
    counted once though it is read and written."""
    size = settings.get("bytes", COPIED_BYTES)
    source, target = torch.ones(size // 4), torch.zeros(size // 4)

    def step() -> Dict[str, float]:
        start = time.perf_counter()
        target.copy_(source)
        return {"bytes_per_second": size / (time.perf_counter() - start)}

    return step
