"""What the command says: the diff on standard output, all else on standard error (the verdict of --check excepted)."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from rich.console import Console
from rich.text import Text

from tools.neox_patch.checkout import PatchError, under_git
from tools.neox_patch.plan import Plan
from tools.neox_patch.record import FOLDER, Record
from tools.neox_patch.text import lines_of

COLOURS = (("diff --git ", "bold"), ("+++", "bold"), ("---", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))

INTERRUPTED = (
    "an earlier run was interrupted while it wrote: --revert takes back what it did, --write does so and starts again"
)
REVIEW = """To review:
  - without head_dim, softmax_scale and qk_norm_type in a config everything is as before, to the last bit; te_mha
    and the Hugging Face converters differ where they were wrong
  - changes of your own next to rewritten lines: the diff shows them
  - code of your own that divides hidden_size by num_attention_heads, which this tool does not look for:
    git grep -n num_attention_heads"""


def say(*lines: str) -> None:
    """Lines on standard error."""
    print(*lines, sep="\n", file=sys.stderr)


def verdict(status: int, line: str) -> int:
    """The one line of --check; returns the exit status."""
    print(line)
    return status


def print_diff(diff: str, no_color: bool) -> None:
    """The diff on standard output: as it is, or coloured on a terminal. Raises BrokenPipeError."""
    console = Console(no_color=True if no_color else None, soft_wrap=True, highlight=False)
    if not console.is_terminal or console.no_color:
        sys.stdout.buffer.write(diff.encode("utf-8"))
        sys.stdout.flush()
        return
    for line in lines_of(diff):
        style = next((style for start, style in COLOURS if line.startswith(start)), "")
        console.print(Text(line.rstrip("\r\n"), style))


def tell_plan(root: Path, plan: Plan, options: argparse.Namespace) -> None:
    """What the diff means, and what to do next."""
    say("", *_overview(root, plan), "", REVIEW, "", "Next:", f"  {_command(options)} --write")


def tell_written(root: Path, plan: Plan, options: argparse.Namespace) -> None:
    """What was done, and what to do next."""
    tests = [path for path in plan.after if path.startswith("tests/") and plan.before[path] is None]
    say(*_overview(root, plan), "", REVIEW, "", "Written. Next:")
    place = shlex.quote(str(root))
    if tests:
        say(f"  (cd {place} && python -m pytest {' '.join(tests)})")
    if _under_git(root):
        added = [path for path, old in plan.before.items() if old is None]
        say(f"  git -C {place} diff", *([f"  git -C {place} add {' '.join(added)}"] if added else []))
    say(
        f"  {_command(options)} --revert    to take it back",
        f"{FOLDER}/ keeps what --revert needs. Git ignores it: once the patch is committed, git can take it back too.",
    )


def tell_reverted(root: Path, made: Record, edited: Sequence[str]) -> None:
    """What was taken back."""
    added = sum(before is None for before, _ in made.files.values())
    say(f"Taken back: {len(made.files) - added} files as before, {added} removed.")
    for path in edited:
        say(f"  {path} keeps what was edited since the patch: look whether that works without it")


def no_record(root: Path) -> str:
    """Why a patch cannot be taken back here, and what git can do."""
    return (
        f"there is no {FOLDER}/ in {root}: the patch was not written here, so only git can take it back. If it is "
        "committed: git log --diff-filter=A -- megatron/head_dim names the commit, git revert COMMIT takes it back; if "
        "it is not: git checkout -- FILE for the files that git status lists as changed, and remove those it has added"
    )


def nothing_written(root: Path) -> str:
    """What to do when constructs were not found."""
    return (
        "so nothing was written. What is named above was looked for by its structure: if you have rewritten it, patch "
        "the state before that and merge; if the checkout is older than November 2024, update it"
    )


def lacking(plan: Plan) -> List[str]:
    """The files that are not as the patch makes them."""
    return sorted({*plan.after, *(line.split(":")[0] for line in plan.missing)})


def _under_git(root: Path) -> bool:
    try:
        return under_git(root)
    except PatchError:
        return False


def _overview(root: Path, plan: Plan) -> List[str]:
    changed = [path for path, old in plan.before.items() if old is not None]
    lines = [f"{root}: {len(changed)} files change, {len(plan.before) - len(changed)} are added"]
    for path, summaries in _by_file(plan.told).items():
        if path in changed:
            lines += [f"  {path}", *(f"    - {summary}" for summary in summaries)]
        else:
            lines.append(f"  {path} (new): {'; '.join(summaries)}")
    lines += _list("There already:", plan.done) + _list("Left out, as this state of GPT-NeoX lacks it:", plan.skipped)
    if not _under_git(root):
        lines.append(f"Not under git, so git diff cannot show the patch afterwards: --write keeps it in {FOLDER}/")
    return lines


def _list(title: str, entries: List[Tuple[str, str]]) -> List[str]:
    return [title, *(f"  {path}: {summary}" for path, summary in entries)] if entries else []


def _by_file(told: List[Tuple[str, str]]) -> Dict[str, List[str]]:
    files: Dict[str, List[str]] = {}
    for path, summary in told:
        files.setdefault(path, []).append(summary)
    return files


def _command(options: argparse.Namespace) -> str:
    dirty = " --allow-dirty" if options.allow_dirty else ""
    return f"python -m tools.neox_patch {shlex.quote(options.path)}{dirty}"
