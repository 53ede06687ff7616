"""Variants of a model side by side, as they are or made to cost the same."""

import argparse
import json
import os
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import yaml
from rich.console import Console
from rich.table import Table

from megatron import costs
from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.equal_widths import by_layer_text, one_or_each
from tools.head_dim.devices import DEVICES
from tools.head_dim.report import BY_LAYER

COLUMNS = ("head_dim", "num_attention_heads", "num_kv_heads", "ffn_hidden_size", "query_width")
SHORT = {
    "num_attention_heads": "heads",
    "num_kv_heads": "kv heads",
    "ffn_hidden_size": "ffn",
    "query_width": "query width",
}
MEASURES = ("parameters", "flops_per_token", "kv_bytes_per_token", "memory_per_rank")
COST: Dict[str, Callable[[NeoXArgs], float]] = {"params": costs.num_parameters, "flops": costs.flops_per_token}
"""What variants can be made equal in."""


def run(args: NeoXArgs, options: argparse.Namespace) -> int:
    """Compare the variants; returns 0.

    Raises ConfigError for a --sweep that names no setting with values or of which no variant is a valid config, and for
    a --plot that cannot be written.
    """
    key, values = parse(options.sweep)
    _check_plot(options.plot)
    rows = [row(args, key, value, options) for value in values]
    if all("problems" in each for each in rows):
        raise ConfigError([f"--sweep {key}={each[key]}: {problem}" for each in rows for problem in each["problems"]])
    if options.json:
        json.dump({"sweep": key, "at_equal": options.at_equal, "variants": rows}, sys.stdout, indent=1)
        print()
    else:
        _print(key, rows, options)
    if options.plot:
        draw(key, rows, options.plot)
    return 0


def _check_plot(path: Optional[str]) -> None:
    folder = os.path.dirname(path or "") or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"--plot {path}: there is no folder {folder}")


def parse(text: str) -> Tuple[str, List[Any]]:
    """KEY=V1,V2,... as a setting and its values."""
    key, _, listed = text.partition("=")
    try:
        values = yaml.safe_load(f"[{listed}]")  # so that a value may be a list or a mapping itself
    except yaml.YAMLError:
        values = []
    if not key or not values:
        raise ConfigError(f"--sweep {text}: write a setting and its values, such as head_dim=64,128")
    return key.strip().replace("-", "_"), values


def row(args: NeoXArgs, key: str, value: Any, options: argparse.Namespace) -> Dict[str, Any]:
    """One variant's numbers; `problems` instead if it is no valid config."""
    try:
        variant = args.update(**{key: value})
        if options.at_equal:
            variant = equalised(args, variant, COST[options.at_equal], options.adjust)
    except ConfigError as error:
        return {key: value, "problems": error.problems}
    result = {
        key: value,
        "num_attention_heads": variant.num_attention_heads,
        "ffn_hidden_size": variant.mlp_geometry().ffn_hidden_size,
        **{name: one_or_each(variant, BY_LAYER[name]) for name in ("head_dim", "num_kv_heads", "query_width")},
        "parameters": costs.num_parameters(variant),
        "flops_per_token": costs.flops_per_token(variant),
        "kv_bytes_per_token": costs.kv_cache_bytes_per_token(variant),
        "memory_per_rank": costs.memory_per_rank(variant).total,
    }
    if options.device:
        result["fits"] = result["memory_per_rank"] <= DEVICES[options.device].memory * 1e9
    return result


def equalised(base: NeoXArgs, variant: NeoXArgs, cost: Callable[[NeoXArgs], float], adjust: str) -> NeoXArgs:
    """The variant with another MLP width, or number of heads, so that it costs what `base` costs, as nearly as it goes.

    Raises ConfigError if nothing positive does.
    """
    wanted = cost(base)
    return _by_heads(variant, wanted, cost) if adjust == "heads" else _by_ffn(variant, wanted, cost)


def _by_ffn(variant: NeoXArgs, wanted: float, cost: Callable[[NeoXArgs], float]) -> NeoXArgs:
    """Costs are linear in the MLP's width."""
    step = variant.model_parallel_size
    width = variant.mlp_geometry().ffn_hidden_size
    per_step = cost(_with_ffn(variant, width + step)) - cost(variant)
    wider = width + step * round((wanted - cost(variant)) / per_step)
    if wider <= 0:
        raise ConfigError(
            f"an MLP of {wider} would be needed to cost the same: attention alone costs more; use --adjust heads"
        )
    return _with_ffn(variant, wider)


def _with_ffn(args: NeoXArgs, width: int) -> NeoXArgs:
    return args.update(ffn_hidden_size=width, intermediate_size=None, expansion_factor=None)


def _by_heads(variant: NeoXArgs, wanted: float, cost: Callable[[NeoXArgs], float]) -> NeoXArgs:
    """Costs grow with the number of key/value heads, each of which keeps its query heads.

    Raises ConfigError if the layers differ: then they have no one number of them.
    """
    geometry = variant.head_geometry()
    best: Optional[NeoXArgs] = None
    for kv_heads in range(1, 4 * geometry.num_kv_heads + 1):
        try:
            candidate = variant.update(
                head_dim=geometry.head_dim,
                num_kv_heads=kv_heads,
                num_attention_heads=kv_heads * geometry.queries_per_kv,
            )
        except ConfigError:
            continue
        if best is None or abs(cost(candidate) - wanted) < abs(cost(best) - wanted):
            best = candidate
    if best is None:
        raise ConfigError("no number of heads makes a valid config")
    return best


def _print(key: str, rows: List[Dict[str, Any]], options: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    equal = f", at equal {options.at_equal} (by {options.adjust})" if options.at_equal else ""
    names = [key, *(name for name in COLUMNS if name != key)]
    shown_names = [SHORT.get(name, name) for name in names]
    heads = ["parameters", "FLOPs/token", "KV bytes/token", "memory/rank"] + (["fits"] if options.device else [])
    console.print(f"{key}{equal}")
    table = Table(*shown_names, *heads)
    for row in rows:
        if "problems" in row:
            table.add_row(str(row[key]), *["-"] * (len(names) + len(heads) - 1))
            continue
        shown = [_shown(name, row[name]) for name in names]
        shown += [f"{row['parameters']:,}", f"{row['flops_per_token']:.4g}", f"{row['kv_bytes_per_token']:,}"]
        shown += [f"{row['memory_per_rank'] / 1e9:.2f} GB"] + (
            ["yes" if row["fits"] else "no"] if options.device else []
        )
        table.add_row(*shown)
    console.print(table)
    for row in rows:
        for problem in row.get("problems", []):
            console.print(f"{key} {row[key]}: {problem}")


def _shown(name: str, value: Any) -> str:
    """In a cell: one width a line."""
    return by_layer_text(value).replace("), ", ")\n") if name in BY_LAYER else str(value)


def draw(key: str, rows: List[Dict[str, Any]], path: str) -> None:
    """One panel for each measure, relative to the first variant that is a valid config."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    valid = [row for row in rows if "problems" not in row]
    figure, panels = plt.subplots(1, len(MEASURES), figsize=(3.2 * len(MEASURES), 3), layout="constrained")
    labels = [_shown(key, row[key]) for row in valid]
    for panel, measure in zip(panels, MEASURES, strict=True):
        heights = [row[measure] / valid[0][measure] for row in valid]
        bars = panel.bar(labels, heights, color="#4878a8")
        panel.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8)
        panel.set_title(measure.replace("_", " "), fontsize=10)
        panel.set_xlabel(key)
        panel.set_ylim(0, 1.15 * max(heights))
    panels[0].set_ylabel(f"relative to {key} {labels[0]}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
