"""How fast each rotary pair turns, and how that compares with the length of the text.

    python -m tools.head_dim wavelengths CONFIG.yml [MORE.yml ...] [--seq N] [--json] [--picture FILE.png]

A pair of dimensions turns by inv_freq radians per token, so once in 2 pi / inv_freq tokens: its wavelength. Shown for
each kind of heads (width, base, rope_scaling, by layer), as the model rotates: rotary_pct, rotary_denominator_scale and
rope_scaling are in it. Where frequencies depend on the length of the text (dynamic, longrope), they are those of N.
Scores depend on differences of positions only, so in a layer with a window that is the length to compare with.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.layer_attention import RotarySettings
from megatron.neox_arguments.per_layer import layers_text
from tools.head_dim import configs
from tools.head_dim.rules import Rule
from tools.options import at_least

_SOURCES = {
    "critical": "Liu et al. 2024, arXiv:2310.05209 (critical dimension)",
    "base": "Xiong et al. 2023, arXiv:2309.16039",
}


class Kind(NamedTuple):
    """One kind of rotation, and who has it. settings None: layers without rotary positions. reach: tokens that a query
    sees, itself included."""

    layer_type: str
    head_dim: int
    reach: int
    settings: Optional[RotarySettings]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="YAML files, merged as for training")
    parser.add_argument("--seq", type=at_least(1), metavar="N", help="tokens in a text (seq_length)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the wavelengths of all pairs")


def run(options: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError for a faulty config, and for one without rotary positions."""
    report = report_on(_load(options))
    if options.picture:
        _draw(report, options.picture)
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        _print(report)
    return 0


def _load(options: argparse.Namespace) -> NeoXArgs:
    changes: Dict[str, Any] = {}
    if options.seq is not None:
        longest = configs.values_of(options.configs).get("max_position_embeddings") or 0
        changes = {"seq_length": options.seq, "max_position_embeddings": max(options.seq, longest)}
    return configs.load(options.configs, **changes)


def report_on(args: NeoXArgs) -> Dict[str, Any]:
    """{"seq_length", "kinds": a report for each, "rules"}; no wavelength is infinite in it, but null."""
    if args.pos_emb != "rotary":
        raise ConfigError(f"pos_emb={args.pos_emb}: there are no rotary pairs; wavelengths are about pos_emb=rotary")
    layers_of: Dict[Kind, List[int]] = {}
    for number in range(args.num_layers):
        for kind in dict.fromkeys(_kinds(args, number)):
            layers_of.setdefault(kind, []).append(number)
    found = [_kind_report(kind, numbers, args.seq_length) for kind, numbers in layers_of.items()]
    rules = [rule._asdict() for kind in found if kind["pairs"] for rule in _rules(kind)]
    return {"seq_length": args.seq_length, "kinds": found, "rules": rules + [_practice()._asdict()]}


def _kinds(args: NeoXArgs, number: int) -> Iterator[Kind]:
    """Those of a layer: one, or one for each of its groups of heads."""
    for index, group in enumerate(args.head_geometry(number).groups):
        attention = args.layer_attention(number, index)
        reach = args.seq_length if attention.window is None else min(args.seq_length, attention.window + 1)
        yield Kind(attention.layer_type, group.head_dim, reach, attention.rotary)


def _kind_report(kind: Kind, numbers: List[int], seq_length: int) -> Dict[str, Any]:
    report = {"layers": layers_text(numbers), "layer_type": kind.layer_type, "head_dim": kind.head_dim}
    report["reach"] = kind.reach
    if kind.settings is None:
        return {**report, "pairs": 0}
    scaling = kind.settings.scaling
    waves = wavelengths(kind.settings, seq_length)
    full = sum(wave <= kind.reach for wave in waves)
    return {
        **report,
        "pairs": len(waves),
        "rotated_dimensions": kind.settings.ndims,
        "base": kind.settings.base,
        "rope_scaling": None if scaling is None else asdict(scaling),
        "shortest": _finite(min(waves)),
        "longest": _finite(max(waves)),
        "turn_within_reach": full,
        "never_turn": len(waves) - full,
        "critical_dimension": 2 * full,
        "wavelengths": [_finite(wave) for wave in waves],
    }


def wavelengths(settings: RotarySettings, seq_length: int) -> List[float]:
    """2 pi / inv_freq of each pair in a text of seq_length tokens; infinite for a pair that does not turn."""
    from megatron.model.rotary import rotary_frequencies

    frequencies, _ = rotary_frequencies(settings, seq_length)
    return [2 * math.pi / frequency if frequency else math.inf for frequency in frequencies.double().tolist()]


def _finite(number: float) -> Optional[float]:
    return number if math.isfinite(number) else None


def base_that_turns_once(rotary_ndims: int, seq_length: int) -> float:
    """With this base the slowest of the pairs turns once in seq_length tokens: 2 pi base^((r - 2) / r) = seq_length."""
    return (seq_length / (2 * math.pi)) ** (rotary_ndims / (rotary_ndims - 2))


def _rules(kind: Dict[str, Any]) -> List[Rule]:
    rules = [_critical_rule(kind)]
    is_plain = kind["rope_scaling"] is None and kind["rotated_dimensions"] > 2 and kind["base"] > 1
    if is_plain and kind["reach"] > 2 * math.pi:
        rules.append(_base_rule(kind))
    return rules


def _critical_rule(kind: Dict[str, Any]) -> Rule:
    says = (
        f"{kind['layers']}: {kind['turn_within_reach']} of {kind['pairs']} pairs turn a full circle within "
        f"{kind['reach']} tokens, {kind['never_turn']} never do. Over longer distances than those of training, pairs "
        "that never turned meet angles that they have not been trained on"
    )
    return Rule("critical dimension", says, "published", _SOURCES["critical"])


def _base_rule(kind: Dict[str, Any]) -> Rule:
    base = base_that_turns_once(kind["rotated_dimensions"], kind["reach"])
    scale = math.log(kind["base"]) / math.log(base)
    says = (
        f"{kind['layers']}: with a base of {base:,.0f} the slowest pair would turn just once in {kind['reach']} tokens "
        f"(from {kind['base']:,.0f}, rotary_denominator_scale {scale:.3g} times what it is now). Above that, a pair "
        "remains that tells all these positions apart; below, all pairs are trained on whole circles"
    )
    return Rule("base for this length", says, "exact", "2 pi base^((r - 2) / r) = tokens")


def _practice() -> Rule:
    says = (
        "for texts of 32,768 tokens, Llama 2 was trained on with the base raised from 10,000 to 500,000, which gave "
        "lower losses at that length than 10,000 or position interpolation"
    )
    return Rule("raising the base", says, "measured", _SOURCES["base"])


def _print(report: Dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    table = Table(title=f"Rotary wavelengths in tokens, texts of {report['seq_length']:,}")
    for name in (
        "layers",
        "type",
        "head_dim",
        "pairs",
        "base",
        "scaling",
        "reach",
        "shortest",
        "longest",
        "turn",
        "never turn",
    ):
        table.add_column(name, justify="left" if name in ("layers", "type", "scaling") else "right")
    for kind in report["kinds"]:
        table.add_row(*_row(kind))
    console.print(table)
    for rule in report["rules"]:
        console.print(f"{rule['name']} ({rule['standing']}; {rule['source']})\n  {rule['says']}")


def _row(kind: Dict[str, Any]) -> List[str]:
    start = [kind["layers"], kind["layer_type"], str(kind["head_dim"]), str(kind["pairs"])]
    if not kind["pairs"]:
        return [*start, *["-"] * 7]
    scaling = kind["rope_scaling"]
    ends = ["never turns" if kind[end] is None else f"{kind[end]:,.1f}" for end in ("shortest", "longest")]
    counts = [str(kind["turn_within_reach"]), str(kind["never_turn"])]
    name = "none" if scaling is None else scaling["rope_type"]
    return [*start, f"{kind['base']:,.6g}", name, f"{kind['reach']:,}", *ends, *counts]


def _draw(report: Dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for kind in report["kinds"]:
        if kind["pairs"]:
            name = f"{kind['layers']}: head_dim {kind['head_dim']}, base {kind['base']:,.6g}"
            axes.plot(range(kind["pairs"]), [wave or math.nan for wave in kind["wavelengths"]], marker=".", label=name)
    axes.axhline(report["seq_length"], color="black", linestyle="--", label=f"seq_length {report['seq_length']:,}")
    axes.set(yscale="log", xlabel="pair of dimensions", ylabel="tokens per turn", title="Rotary wavelengths")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
