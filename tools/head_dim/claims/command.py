"""The command line of the claims."""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict

from tools.options import at_least

ROOT = Path(__file__).resolve().parents[3]
STUDIES = ROOT / "tools" / "head_dim" / "studies"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    number = at_least(1)
    parser.add_argument("--out", default=os.path.join("runs", "claims"), metavar="DIR", help="the runs (runs/claims)")
    parser.add_argument(
        "--page", metavar="DIR", help="where claims.md, its pictures and claims.json go (that of --out)"
    )
    parser.add_argument("--jobs", type=number, default=1, metavar="N", help="runs at a time; they share the cores (1)")
    parser.add_argument("--no-training", action="store_true", help="write the page anew from the claims.json in --page")
    parser.add_argument("--discard-changed", action="store_true", help="train runs anew that had other settings")


def run(options: argparse.Namespace) -> int:
    """Returns 0 whatever the verdicts are, 1 if a run failed, 130 if it was interrupted."""
    from tools.ending import sigterm_as_exit
    from tools.head_dim.claims import page
    from tools.head_dim.claims.claims import CLAIMS
    from tools.head_dim.claims.verdict import judge_all

    folder = options.page or options.out
    if options.no_training:
        data = page.read(folder)
    else:
        try:
            with sigterm_as_exit():
                data = _train(options)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on from what is in {options.out}", file=sys.stderr)
            return 128 + signal.SIGINT
    files = page.write(data, folder)
    for verdict in judge_all(data["studies"], CLAIMS):
        print(f"{verdict.claim.says}:\n    {verdict.sentence}")
    print(f"written: {', '.join(files)}")
    failed = [run for study in data["studies"].values() for run in study["runs"] if run["status"] == "failed"]
    return 1 if failed else 0


def _train(options: argparse.Namespace) -> Dict[str, Any]:
    """The figures of all studies; what is trained already is kept."""
    from tools.bench.report import machine
    from tools.head_dim.claims.claims import studies
    from tools.head_dim.claims.figures import figures_of
    from tools.head_dim.sweep.api import run_study

    found = {}
    for name in studies():
        results = run_study(
            study_named(name),
            os.path.join(options.out, name),
            jobs=options.jobs,
            data_dir=os.path.join(options.out, "data"),
            discard_changed=options.discard_changed,
        )
        found[name] = figures_of(results)
    return {"machine": machine(), "studies": found}


def study_named(name: str) -> Any:
    """One of the studies that ship; the paths in it are relative to the project, wherever the command is given."""
    from megatron.neox_arguments.loading import parse
    from tools.head_dim.sweep.api import study_of

    path = STUDIES / f"{name}.yml"
    contents = parse(path.read_text(encoding="utf-8"), str(path))
    contents["base"] = [str(ROOT / part) for part in contents["base"]]
    return study_of(contents, str(path))
