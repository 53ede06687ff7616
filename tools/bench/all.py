"""Every benchmark that a CPU can run, in a short form, one after the other: `make bench`.

    python -m tools.bench.all [--only NAME ...] [--minutes 15] [--out DIR]

Writes DIR/NAME*.json and pictures for each, and DIR/summary.json: what is wanted, what was measured, whether it is met.
A benchmark that fails is named at the end, and the others run all the same; the exit code is then 1. A target that is
missed is a finding, not a failure. It ends in the time that it is given: a benchmark that would take longer than what
is left is not begun, and said not to have been.
"""

import glob
import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from tools.bench import report
from tools.ending import sigterm_as_exit


class Short(NamedTuple):
    """A short form: tools.bench.MODULE_bench with these arguments, and about how long it takes on two cores."""

    module: str
    seconds: int
    arguments: List[str]


SHORT: Dict[str, Short] = {
    "train_bfloat16": Short("train", 150, ["--precision", "bfloat16", "--groups", "step"]),
    "train_fp32": Short("train", 150, ["--precision", "fp32", "--groups", "short"]),
    "decode": Short("decode", 210, []),
    "loss": Short("loss", 60, ["--lines", "ours, fused", "ours, fused, two ranks", "--repeats", "1"]),
    "memory_estimate": Short("memory", 75, ["--parts", "estimate"]),
    "startup": Short("startup", 40, []),
    "attention": Short("attention", 50, ["--repeats", "1"]),
    "data": Short("data", 60, []),
    "convert": Short("convert", 30, ["--model", "qwen3-0.6b", "--layers", "8"]),
    "scaling": Short("scaling", 40, ["--only", "length"]),
}
"""By the name of what it writes, the most important first."""
MARGIN = 10
"""Seconds to write the summary in."""
FAILED, CUT, LATE = "failed", "ended: no time left", "not run: no time left"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run them; returns 1 if one failed."""
    parser = report.parser(__doc__, "NAME")
    parser.add_argument("--only", nargs="+", choices=SHORT, default=list(SHORT), metavar="NAME", help="some of them")
    parser.add_argument("--minutes", type=float, default=15, help="for all of them; default: %(default)s")
    options = parser.parse_args(arguments)
    os.makedirs(options.out, exist_ok=True)
    took, end = [], time.monotonic() + 60 * options.minutes - MARGIN
    with sigterm_as_exit():
        for name in options.only:
            took.append(run(name, options.out, end - time.monotonic()))
    ran = [each["benchmark"] for each in took if each["result"] != LATE]  # what lies there of the others is older
    found = [target for name in ran for target in targets(name, options.out)]
    report.show("benchmarks", took)
    report.report(options.out, "summary", "targets", summary(found), benchmarks=took)
    return 1 if any(each["result"] == FAILED for each in took) else 0


def run(name: str, folder: str, left: float) -> report.Row:
    """One benchmark in a process of its own, which has `left` seconds."""
    short = SHORT[name]
    print(f"\n{name}: about {short.seconds} s on two cores, {max(left, 0):.0f} s left", flush=True)
    if short.seconds > left:
        return {"benchmark": name, "seconds": 0.0, "result": LATE}
    for old in result_files(name, folder):
        os.remove(old)  # so that a failure does not show an older run
    start = time.monotonic()
    command = [sys.executable, "-m", f"tools.bench.{short.module}_bench", *short.arguments, "--out", folder]
    try:
        result = "done" if subprocess.run(command, timeout=left).returncode == 0 else FAILED
    except subprocess.TimeoutExpired:
        result = CUT
    row = {"benchmark": name, "seconds": time.monotonic() - start, "result": result}
    print(f"{name}: {result}, {row['seconds']:.0f} s", flush=True)
    return row


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
    """Where a benchmark has written its figures: NAME.json, and NAME_PART.json where it is of several parts."""
    return sorted(glob.glob(os.path.join(folder, f"{name}.json")) + glob.glob(os.path.join(folder, f"{name}_*.json")))


if __name__ == "__main__":
    sys.exit(main())
