"""Give a GPT-NeoX checkout an explicit head_dim.

    python -m tools.neox_patch PATH             show what would change: a unified diff, and what it means
    python -m tools.neox_patch PATH --write     do it, all of it or nothing
    python -m tools.neox_patch PATH --check     exit status 0: patched; 1: not, or not wholly; 2: it cannot be
    python -m tools.neox_patch PATH --revert    take it back

The diff goes to standard output and all else to standard error, so it can be kept and given to `git apply`. --write
keeps what --revert needs in PATH/.head_dim_patch, which git ignores. The exit status is 2 if something cannot be done.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Optional, Sequence

from megatron.errors import NeoXError
from tools.neox_patch import checkout, explain, record, writing
from tools.neox_patch.change import Patch
from tools.neox_patch.changes import whole_patch
from tools.neox_patch.checkout import PatchError
from tools.neox_patch.plan import Plan, make_plan
from tools.neox_patch.record import Record

DONE, NOT_DONE, CANNOT = 0, 1, 2
"""Exit statuses; NOT_DONE is one of --check alone."""


def main(arguments: Optional[Sequence[str]] = None, patch: Optional[Patch] = None) -> int:
    """Run the command; returns the exit status. patch: by default the whole of it."""
    options = _parse(arguments)
    try:
        root = checkout.checkout_root(options.path)
        action = _revert if options.revert else _check if options.check else _write if options.write else _show
        return action(root, options, patch or whole_patch())
    except (NeoXError, OSError) as error:
        print(f"neox_patch: {error}", file=sys.stderr)
        return CANNOT


def _parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.neox_patch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="root of a GPT-NeoX checkout, of November 2024 or newer")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="make the changes")
    action.add_argument("--check", action="store_true", help="say in one line whether they are made")
    action.add_argument("--revert", action="store_true", help="take them back")
    parser.add_argument(
        "--allow-dirty", action="store_true", help="write although tracked files have uncommitted changes"
    )
    parser.add_argument("--no-color", action="store_true", help="plain text on a terminal too")
    return parser.parse_args(arguments)


def _show(root: Path, options: argparse.Namespace, patch: Patch) -> int:
    made = record.load(root)
    if writing.is_interrupted(made):
        raise PatchError(explain.INTERRUPTED)
    plan = _plan(root, patch, made)
    if plan.complete:
        explain.say(f"{root} is patched: nothing is left to change")
        return DONE
    try:
        explain.print_diff(plan.diff(), options.no_color)
    except BrokenPipeError:  # a pager that was left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    explain.tell_plan(root, plan, options)
    return DONE


def _write(root: Path, options: argparse.Namespace, patch: Patch) -> int:
    made = record.load(root)
    if writing.is_interrupted(made):
        writing.revert(root, made)
        explain.say("An earlier run was interrupted; what it did was taken back.")
        made = None
    plan = _plan(root, patch, made)
    if plan.complete:
        explain.say(f"{root} is patched: nothing is left to change")
        return DONE
    if not options.allow_dirty:
        checkout.check_clean(root)
    writing.write(root, plan)
    explain.tell_written(root, plan, options)
    return DONE


def _plan(root: Path, patch: Patch, made: Optional[Record]) -> Plan:
    """What is to be done. Raises PatchError if it cannot be."""
    checkout.check_no_other_head_dim(root)
    plan = make_plan(root, patch, progress=sys.stderr.isatty())
    obstacle = _record_in_the_way(root, plan, made)
    if obstacle:
        raise PatchError(obstacle)
    if plan.missing:
        raise PatchError([*plan.missing, explain.nothing_written(root)])
    return plan


def _record_in_the_way(root: Path, plan: Plan, made: Optional[Record]) -> Optional[str]:
    """Why a patch that --write made earlier has to be taken back before it is made again."""
    if plan.complete or made is None or not checkout.is_touched(root) or writing.all_before(root, made):
        return None
    if made.version != record.patch_version():
        return "patched by another version of this tool: --revert first, then --write"
    return f"partly patched ({', '.join(explain.lacking(plan))} not): --revert first, then --write"


def _check(root: Path, options: argparse.Namespace, patch: Patch) -> int:
    made = record.load(root)
    if writing.is_interrupted(made):
        return explain.verdict(NOT_DONE, explain.INTERRUPTED)
    checkout.check_no_other_head_dim(root)
    plan = make_plan(root, patch, progress=sys.stderr.isatty())
    if plan.complete:
        return explain.verdict(DONE, "patched")
    obstacle = _record_in_the_way(root, plan, made)
    if obstacle:
        return explain.verdict(NOT_DONE, obstacle)
    if plan.missing:
        return explain.verdict(CANNOT, f"cannot be patched: not found: {'; '.join(plan.missing)}")
    if checkout.is_touched(root):
        return explain.verdict(NOT_DONE, f"partly patched ({', '.join(explain.lacking(plan))} not): --write")
    return explain.verdict(NOT_DONE, "not patched; it can be: --write")


def _revert(root: Path, options: argparse.Namespace, patch: Patch) -> int:
    made = record.load(root)
    if made is None:
        if not checkout.is_touched(root):
            explain.say(f"{root} is not patched: nothing to take back")
            return DONE
        raise PatchError(explain.no_record(root))
    edited = writing.revert(root, made)
    explain.tell_reverted(root, made, edited)
    return DONE
