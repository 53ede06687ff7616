"""The report of `plan`: a dict of plain numbers, and tables of it."""

import argparse
import sys
from dataclasses import asdict
from typing import Any, Callable, Dict, List, Optional, Tuple

from rich.console import Console
from rich.table import Table

from megatron import costs
from megatron.errors import ConfigError
from megatron.geometry import HeadGeometry
from megatron.mixed_geometry import AnyHeadGeometry
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.equal_widths import (
    head_dims,
    layer_text,
    layers_by_value,
    of_groups,
    one_or_each,
    one_or_list,
    softmax_scales,
)
from megatron.neox_arguments.per_layer import layers_text
from tools.head_dim.backends import verdicts
from tools.head_dim.devices import DEVICES, Device

SUGGESTIONS = 3
KV = "key/value"


def report_on(args: NeoXArgs, options: argparse.Namespace) -> Dict[str, Any]:
    """Sections geometry, parameters, flops, kv_cache, memory and backends; see the tables for the units."""
    device = DEVICES[options.device] if options.device else None
    return {
        "geometry": _geometry(args),
        "parameters": {**costs.parameter_parts(args), "total": costs.num_parameters(args)},
        "trained_parameters": costs.num_trained_parameters(args),
        "flops": _flops(args, device, options.mfu),
        "kv_cache": _cache(args, options.batch),
        "memory": _memory(args, device),
        "backends": [asdict(verdict) for verdict in verdicts(args)],
    }


BY_LAYER: Dict[str, Callable[[AnyHeadGeometry], Any]] = {
    "num_kv_heads": lambda geometry: geometry.num_kv_heads,
    "head_dim": head_dims,
    "query_width": lambda geometry: geometry.query_hidden_size,
    "kv_width": lambda geometry: geometry.kv_hidden_size,
    "qkv_width": lambda geometry: geometry.qkv_hidden_size,
    "rotary_dimensions": lambda geometry: of_groups(geometry, lambda group: group.rotary_ndims),
}
"""What may differ from layer to layer: then there is a list in its place, with a number for each layer; and where a
layer's heads are in groups, a list of theirs in place of a number."""
GROUPS = "groups"
"""Only where there are such layers: [head_dim, query heads, key/value heads] of each group of each layer."""


def _geometry(args: NeoXArgs) -> Dict[str, Any]:
    return {
        "layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.num_attention_heads,
        **{name: one_or_each(args, number) for name, number in BY_LAYER.items()},
        **_groups(args),
        "softmax_scale": one_or_list([softmax_scales(args, number) for number in range(args.num_layers)]),
        "mlp_width": args.mlp_geometry().ffn_hidden_size,
        "vocabulary": args.padded_vocab_size,
        "seq_length": args.seq_length,
    }


def _groups(args: NeoXArgs) -> Dict[str, Any]:
    layers = [args.head_geometry(number).groups for number in range(args.num_layers)]
    if all(len(groups) == 1 for groups in layers):
        return {}
    return {GROUPS: [tuple(map(_group, groups)) for groups in layers]}


def _group(group: HeadGeometry) -> Tuple[int, int, int]:
    return group.head_dim, group.num_attention_heads, group.num_kv_heads


def _flops(args: NeoXArgs, device: Optional[Device], mfu: float) -> Dict[str, Any]:
    forward = costs.forward_flops(args)
    result: Dict[str, Any] = {**forward, "forward": sum(forward.values()), "training": costs.flops_per_token(args)}
    if device is not None and device.bf16_tflops is not None:
        peak = device.bf16_tflops * 1e12
        result["device"] = device.name
        result["mfu"] = mfu
        result["tokens_per_second_per_device"] = mfu * peak / result["training"]
    return result


def _cache(args: NeoXArgs, batch: int) -> Dict[str, Any]:
    return {
        "dtype": args.kv_cache_dtype or args.precision,
        "bytes_per_token": costs.kv_cache_bytes_per_token(args),
        "batch": batch,
        "tokens": args.seq_length,
        "bytes": costs.kv_cache_bytes(args, batch, args.seq_length),
        "bytes_per_rank": costs.kv_cache_bytes_per_rank(args, batch, args.seq_length),
    }


def _memory(args: NeoXArgs, device: Optional[Device]) -> Dict[str, Any]:
    estimate = costs.memory_per_rank(args)
    result: Dict[str, Any] = {**asdict(estimate), "layout": _layout(args)}
    if device is not None:
        result["device"] = device.name
        result["device_bytes"] = device.memory * 1e9
        result["fits"] = estimate.total <= result["device_bytes"]
        result["would_fit"] = [] if result["fits"] else _would_fit(args, result["device_bytes"])
    return result


def _layout(args: NeoXArgs) -> str:
    checkpointed = ", activations checkpointed" if args.checkpoint_activations else ""
    return (
        f"{args.global_num_gpus} devices, tp {args.model_parallel_size}, pp {args.pipe_parallel_size}, "
        f"zero {args.zero_stage}, micro batch {args.train_micro_batch_size_per_gpu} x {args.seq_length}{checkpointed}"
    )


def _would_fit(args: NeoXArgs, limit: float) -> List[str]:
    """A few layouts of the same devices that fit, those nearest to the present one first."""
    found = []
    for ranks in (1, 2, 4, 8):
        for checkpointed in (False, True):
            for stage in (0, 1, 2, 3):
                variant = _variant(args, ranks, checkpointed, stage)
                if variant is not None and costs.memory_per_rank(variant).total <= limit:
                    changes = (ranks != args.model_parallel_size, checkpointed and not args.checkpoint_activations)
                    found.append((sum(changes), ranks, checkpointed, stage, _layout(variant)))
    return [layout for *_, layout in sorted(found)[:SUGGESTIONS]]


def _variant(args: NeoXArgs, ranks: int, checkpointed: bool, stage: int) -> Optional[NeoXArgs]:
    zero = {**(args.zero_optimization or {}), "stage": stage}
    try:
        return args.update(
            model_parallel_size=ranks,
            checkpoint_activations=checkpointed,
            zero_optimization=zero,
            train_batch_size=None,
        )
    except ConfigError:
        return None


def tables(report: Dict[str, Any]) -> None:
    """Print the report."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    geometry = report["geometry"]
    for layers, of_layers in widths_by_layer(geometry).items():
        console.print(f"{layers}{widths_drawn(of_layers)}")
    console.print()
    same = {name: value for name, value in geometry.items() if not isinstance(value, list)}
    console.print("Geometry", _two_columns(same, _plain), sep="\n")
    if len(same) < len(geometry):
        console.print("Widths by layer", _layers(geometry), sep="\n")
    total = report["parameters"]["total"]
    console.print("Parameters", _two_columns(report["parameters"], lambda n: f"{n:,}  {n / total:.1%}"), sep="\n")
    if report["trained_parameters"] < total:
        trained = report["trained_parameters"]
        console.print(f"{trained:,} of them ({trained / total:.2%}) are trained, in adapters; the rest is frozen\n")
    forward = report["flops"]["forward"]
    rows = {key: value for key, value in report["flops"].items() if isinstance(value, (int, float))}
    speed = rows.pop("tokens_per_second_per_device", None)
    rows.pop("mfu", None)
    console.print("GFLOP per token: the parts of the forward pass, and a training step")
    console.print(_two_columns(rows, lambda n: f"{n / 1e9:.4g}  {n / forward:.1%}"))
    if speed is not None:
        flops = report["flops"]
        console.print(f"At {flops['mfu']:.0%} of {flops['device']}'s bf16 peak: {speed:,.0f} tokens/s per device\n")
    cache = report["kv_cache"]
    console.print(
        f"KV cache ({cache['dtype']}): {cache['bytes_per_token']:,} bytes a token; {_size(cache['bytes'])} for "
        f"{cache['batch']} x {cache['tokens']} tokens, {_size(cache['bytes_per_rank'])} on each rank\n"
    )
    memory = report["memory"]
    parts = {key: value for key, value in memory.items() if isinstance(value, int) and not isinstance(value, bool)}
    console.print(f"Training memory of the fullest rank ({memory['layout']})", _two_columns(parts, _size), sep="\n")
    console.print(
        "total is the most at one moment: gradients grow while activations go. The device's own needs come on top."
    )
    if "fits" in memory:
        word = "fits" if memory["fits"] else "does not fit"
        console.print(f"It {word} on {memory['device']} ({_size(memory['device_bytes'])}).")
        for layout in memory["would_fit"]:
            console.print(f"  would fit: {layout}")
        if not memory["fits"] and not memory["would_fit"]:
            console.print("  no layout of these devices with tp up to 8 fits: use more devices")
        console.print()
    console.print("Backends", _backends(report["backends"]), sep="\n")


def widths_by_layer(geometry: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """The section's numbers as those of one layer, for each kind of layers: "layers 0-3: " or, if all are alike, ""."""
    varying = [name for name, value in geometry.items() if isinstance(value, list)]
    if not varying:
        return {"": geometry}
    kinds = layers_by_value(list(zip(*(geometry[name] for name in varying), strict=True)))
    return {
        f"{layers_text(layers)}: ": {**geometry, **dict(zip(varying, kind, strict=True))}
        for kind, layers in kinds.items()
    }


def _layers(geometry: Dict[str, Any]) -> Table:
    varying = [name for name, value in geometry.items() if isinstance(value, list) and name != GROUPS]
    table = Table("layers", *(name.replace("_", " ") for name in varying))
    for layers, of_layers in widths_by_layer(geometry).items():
        table.add_row(layers.rstrip(": ").split(" ", 1)[1], *(_plain(of_layers[name]) for name in varying))
    return table


def widths_drawn(geometry: Dict[str, Any]) -> str:
    """The way of the widths through one attention layer."""
    g = geometry
    groups = g.get(GROUPS) or [(g["head_dim"], g["num_attention_heads"], g["num_kv_heads"])]
    queries, keys = (" + ".join(f"{group[i]} x {group[0]}" for group in groups) for i in (1, 2))
    queries, keys = (text.replace(" x", f" {kind} heads x", 1) for text, kind in ((queries, "query"), (keys, KV)))
    return (
        f"residual {g['hidden_size']} -> QKV {g['qkv_width']} -> {queries} = {g['query_width']}, {keys} = "
        f"{g['kv_width']} -> output {g['query_width']} -> residual {g['hidden_size']}"
    )


def _two_columns(rows: Dict[str, Any], shown) -> Table:
    table = Table("", "", show_header=False)
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), shown(value))
    return table


def _backends(rows: List[Dict[str, Any]]) -> Table:
    table = Table("backend", "device", "precision", "runs", "note")
    for row in rows:
        table.add_row(row["backend"], row["device"], row["precision"], "yes" if row["runs"] else "no", row["note"])
    return table


def _plain(value: Any) -> str:
    return layer_text(value, lambda number: f"{number:.6g}" if isinstance(number, float) else str(number))


def _size(number: float) -> str:
    """Bytes in powers of ten, as devices' memory is sold."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f} bytes"
