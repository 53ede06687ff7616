"""Rules of thumb for choosing head_dim, each with its source and with how much stands behind it.

    python -m tools.head_dim suggest --hidden 2048 --heads 16 [--task long_seq|fine_grained|general] [--seq 8192]

They are heuristics. Only a trained model says which width is better: `plan --sweep head_dim=... --at-equal params`
gives configs of equal cost to train.
"""

import argparse
import json
import sys
from typing import Any, Dict, List

from rich.console import Console
from rich.table import Table

from tools.head_dim import rules
from tools.options import at_least

WARNING = (
    "Heuristics. 'exact' is arithmetic; 'published' is what others chose, not that it is best; 'measured' was measured "
    "by the source, on its models; 'claimed' was measured by nobody that is named here."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    number = at_least(1)
    parser.add_argument("--hidden", type=number, required=True, metavar="H", help="hidden_size")
    parser.add_argument("--heads", type=number, required=True, metavar="N", help="num_attention_heads")
    parser.add_argument("--kv-heads", type=number, metavar="M", help="num_kv_heads (as many as heads)")
    parser.add_argument("--layers", type=number, default=1, metavar="L", help="num_layers (1)")
    parser.add_argument("--seq", type=number, default=4096, metavar="S", help="seq_length (4096)")
    parser.add_argument("--base", type=float, default=10000.0, help="rotary_emb_base (10000)")
    parser.add_argument("--task", choices=rules.TASKS, default="general", help="what the model is for (general)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 0."""
    width, why = rules.suggested_width(options.hidden, options.task)
    found = rules.all_rules(rules.Question(**_question(options), head_dim=width))
    if options.json:
        json.dump(_as_json(width, why, found), sys.stdout, indent=1)
        print()
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(f"head_dim {width}: {why}")
    console.print(WARNING + "\n")
    table = Table("rule", "says", "stands on", "source", show_lines=True)
    for rule in found:
        table.add_row(rule.name, rule.says, rule.standing, rule.source)
    console.print(table)
    return 0


def _question(options: argparse.Namespace) -> Dict[str, Any]:
    return dict(
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        num_kv_heads=options.kv_heads or options.heads,
        num_layers=options.layers,
        seq_length=options.seq,
        rotary_emb_base=options.base,
    )


def _as_json(width: int, why: str, found: List[rules.Rule]) -> Dict[str, Any]:
    return {"head_dim": width, "why": why, "warning": WARNING, "rules": [rule._asdict() for rule in found]}
