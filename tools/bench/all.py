"""Every benchmark that a CPU can run, in a short form, one after the other: `make bench`.

    python -m tools.bench.all [--only NAME ...] [--out DIR]

Writes DIR/NAME*.json and pictures for each, and DIR/summary.json: what is wanted, what was measured, whether it is met.
A benchmark that fails is named at the end, and the others run all the same; the exit code is then 1. A target that is
missed is a finding, not a failure.
"""

import glob
import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

from tools.bench import report
from tools.ending import sigterm_as_exit

SHORT: Dict[str, List[str]] = {
    "train": ["--groups", "step"],
    "memory": ["--lines", "transformers", "ours, compiled", "--repeats", "1"],
    "loss": [],
    "attention": [],
    "decode": [],
    "data": [],
    "startup": [],
    "scaling": [],
    "convert": ["--model", "qwen3-0.6b", "--layers", "8"],
}
"""Name -> the arguments of its short form; the module is tools.bench.NAME_bench."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run them; returns 1 if one failed."""
    parser = report.parser(__doc__, "NAME")
    parser.add_argument("--only", nargs="+", choices=SHORT, default=list(SHORT), metavar="NAME", help="some of them")
    options = parser.parse_args(arguments)
    os.makedirs(options.out, exist_ok=True)
    took = {}
    with sigterm_as_exit():
        for name in options.only:
            took[name] = run(name, options.out)
    found = [target for name in options.only for target in targets(name, options.out)]
    seconds = [
        {"benchmark": name, "seconds": each["seconds"], "exit code": each["code"]} for name, each in took.items()
    ]
    report.show("benchmarks", seconds)
    report.report(options.out, "summary", "targets", summary(found), benchmarks=seconds)
    return 1 if any(each["code"] for each in took.values()) else 0


def run(name: str, folder: str) -> Dict[str, Any]:
    """One benchmark in a process of its own."""
    print(f"\n{name} ...", flush=True)
    for old in result_files(name, folder):
        os.remove(old)  # so that a failure does not show an older run
    start = time.monotonic()
    command = [sys.executable, "-m", f"tools.bench.{name}_bench", *SHORT[name], "--out", folder]
    code = subprocess.run(command).returncode
    return dict(seconds=time.monotonic() - start, code=code)


def targets(name: str, folder: str) -> List[Dict[str, Any]]:
    """The targets that a benchmark wrote, with its name."""
    found = []
    for path in result_files(name, folder):
        with open(path) as file:
            found += [{"benchmark": name, **target} for target in json.load(file)["targets"]]
    return found


def summary(found: Sequence[Dict[str, Any]]) -> List[report.Row]:
    """All targets as one table."""
    rows = []
    for each in found:
        target = report.Target(*(each[name] for name in report.Target._fields))
        rows.append({"benchmark": each["benchmark"], **report.target_rows([target])[0]})
    return rows


def result_files(name: str, folder: str) -> List[str]:
    """Where a benchmark has written its figures: NAME.json and NAME_PART.json."""
    return sorted(glob.glob(os.path.join(folder, f"{name}.json")) + glob.glob(os.path.join(folder, f"{name}_*.json")))


if __name__ == "__main__":
    sys.exit(main())
