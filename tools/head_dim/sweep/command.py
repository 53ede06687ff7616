"""The command line of a sweep."""

import argparse
import os
import signal
import sys

from tools.options import at_least


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    number = at_least(1)
    parser.add_argument("study", metavar="STUDY.yml")
    parser.add_argument("--out", metavar="DIR", help="where runs and report are kept (runs/sweeps/STUDY)")
    parser.add_argument("--jobs", type=number, default=1, metavar="N", help="runs at a time; they share the cores (1)")
    parser.add_argument("--dry-run", action="store_true", help="prepare the data and print the plan; train nothing")
    parser.add_argument("--report-only", action="store_true", help="train nothing; report what is there")
    parser.add_argument("--discard-changed", action="store_true", help="train runs anew that had other settings")
    parser.add_argument("--docs", action="store_true", help="put the report of a study that ships into docs")
    parser.add_argument("--keep-checkpoints", action="store_true", help="of finished runs too, in runs/*/*/checkpoints")


def run(options: argparse.Namespace) -> int:
    """Returns 0, 1 if a run failed, 128 + the signal's number if one ended it."""
    from tools.ending import sigterm_as_exit
    from tools.head_dim.sweep import page, report
    from tools.head_dim.sweep.study import load_study
    from tools.head_dim.sweep.sweep import Sweep, run_study

    study = load_study(options.study)
    out = options.out or os.path.join("runs", "sweeps", os.path.splitext(os.path.basename(options.study))[0])
    if options.dry_run:
        report.show_plan(Sweep.of(study, out))
        return 0
    if options.report_only:
        results = Sweep.of(study, out).collect()
    else:
        try:
            with sigterm_as_exit():
                results = run_study(
                    study,
                    out,
                    jobs=options.jobs,
                    discard_changed=options.discard_changed,
                    keep_checkpoints=options.keep_checkpoints,
                )
        except (KeyboardInterrupt, SystemExit) as stop:
            print(f"stopped; the same command goes on from what is in {out}", file=sys.stderr)
            return stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT
    files = report.write(results, out)
    if options.docs:
        files += page.publish(options.study, out)
    report.show(results)
    print(f"written: {', '.join(files)}")
    return 1 if any(each["status"] == "failed" for each in results["runs"]) else 0
