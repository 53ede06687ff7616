"""python -m tools.head_dim_tables: the tables of neox_args_head_dim.md that are arithmetic: costs, backends, splits.

Only the parts between marker comments are written. With --check nothing is: the exit code is 1 if the page has others.
"""

import argparse
import sys
from pathlib import Path
from typing import Callable, Dict, List, Sequence

import torch

from megatron import costs
from megatron.geometry import HeadGeometry
from megatron.model.attention.core import KERNELS, AttentionRequest
from megatron.model.attention.core.flash import HEAD_DIM_MULTIPLE
from megatron.neox_arguments import NeoXArgs
from tools.head_dim import published
from tools.page_section import PageSection

PATH = Path(__file__).resolve().parents[1] / "neox_args_head_dim.md"
COSTED = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-32B", "Mistral-Nemo-12B", "Gemma-7B", "Gemma-3-27B", "Llama-3.1-8B")
TOKENS = 4096
WIDTHS = (8, 20, 64, 80, 128, 192, 256, 320, 512)
SPLIT = ((32, 8), (16, 8), (12, 2), (64, 8), (4, 1), (24, 4))
RANKS = (2, 4, 8)


def costs_table() -> str:
    """What the true head_dim costs, and what the quotient in its place would."""
    rows = []
    for name in COSTED:
        model = published.named(name)
        true, wrong = _model(model, model.head_dim), _model(model, _quotient(model))
        rows.append(
            [
                name,
                f"{model.head_dim} / {_quotient(model)}",
                f"{costs.num_parameters(true):,}",
                f"{_percent(costs.num_parameters(wrong), costs.num_parameters(true))}",
                f"{costs.flops_per_token(true) / 1e9:.3f}",
                f"{_percent(costs.flops_per_token(wrong), costs.flops_per_token(true))}",
                f"{costs.kv_cache_bytes_per_token(true):,}",
                f"{_percent(costs.kv_cache_bytes_per_token(wrong), costs.kv_cache_bytes_per_token(true))}",
            ]
        )
    head = ["model", "head_dim / quotient", "parameters", "by quotient", f"GFLOP a token, {TOKENS} tokens"]
    return _table([*head, "by quotient", "KV bytes a token, bf16", "by quotient"], rows)


def backends_table() -> str:
    """What each kernel does with a head_dim."""
    columns = [(name, device, dtype) for name in KERNELS for device, dtype in (("cpu", "fp32"), ("cuda", "bfloat16"))]
    rows = [[str(width), *(_cell(width, *column) for column in columns)] for width in WIDTHS]
    return _table(["head_dim", *(f"`{name}`, {device}, {dtype}" for name, device, dtype in columns)], rows)


def splits_table() -> str:
    """Heads of a rank by model_parallel_size."""
    rows = [[f"{heads} / {kv}", *(_split(heads, kv, ranks) for ranks in RANKS)] for heads, kv in SPLIT]
    return _table(["query / kv heads", *(f"TP {ranks}" for ranks in RANKS)], rows)


TABLES: Dict[str, Callable[[], str]] = {"costs": costs_table, "backends": backends_table, "splits": splits_table}


def section(name: str) -> PageSection:
    """Where a table stands."""
    start = f"<!-- the table of {name}: written by python -m tools.head_dim_tables -->"
    return PageSection(PATH, start, f"<!-- end of the table of {name} -->")


def _model(model: published.Published, head_dim: int) -> NeoXArgs:
    """The published widths in a plain model: the counts of norms on queries and keys included, windows left out."""
    return NeoXArgs.from_dict(
        dict(
            num_layers=model.num_layers, hidden_size=model.hidden_size, head_dim=head_dim, pos_emb="rotary",
            num_attention_heads=model.num_attention_heads, num_kv_heads=model.num_kv_heads, norm="rmsnorm",
            ffn_hidden_size=model.intermediate_size, activation="swiglu", precision="bfloat16",
            seq_length=TOKENS, max_position_embeddings=TOKENS, no_weight_tying=not model.tie_embeddings,
            padded_vocab_size=model.vocab_size, qk_norm_type=model.qk_norm_type, use_bias_in_attn_linear=False,
            norm_placement="sandwich" if model.hf_type in ("gemma2", "gemma3_text") else "pre",
            use_bias_in_mlp=False, train_micro_batch_size_per_gpu=1,
        )
    )  # fmt: skip


def _quotient(model: published.Published) -> int:
    return HeadGeometry.from_config(model.hidden_size, model.num_attention_heads).head_dim


def _percent(wrong: float, true: float) -> str:
    return f"{wrong / true - 1:+.1%}"


def _cell(width: int, name: str, device: str, precision: str) -> str:
    dtype = {"fp32": torch.float32, "bfloat16": torch.bfloat16}[precision]
    request = AttentionRequest(HeadGeometry(4 * width, 4, 2, width), dtype, torch.device(device), tokens=TOKENS)
    if KERNELS[name].refusal(request) is not None:
        return "refused"
    padded = -(-width // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
    return f"at {padded}" if name == "flash" and padded != width else "yes"


def _split(heads: int, kv_heads: int, ranks: int) -> str:
    geometry = HeadGeometry(heads, heads, kv_heads, 1)
    if geometry.shard_problems(ranks):
        return "refused"
    part, shared = geometry.shard(ranks), geometry.kv_replicas(ranks)
    return f"{part.num_attention_heads} / {part.num_kv_heads}" + (f", on {shared} ranks each" if shared > 1 else "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines: List[Sequence[str]] = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> int:
    """Write the tables, or with --check say which are not those of today; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is an older one")
    check, stale = parser.parse_args().check, []
    for name, make in TABLES.items():
        text = make()
        if section(name).written() != text:
            stale.append(name)
            if not check:
                section(name).write(text)
    if check and stale:
        print(f"{PATH.name}: the tables of {', '.join(stale)} are not today's; run python -m tools.head_dim_tables")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
