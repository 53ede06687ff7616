"""python -m tools.neox_patch_table: what patched checkouts of GPT-NeoX compute, measured; writes docs/neox_patch.md.

GPT_NEOX_CHECKOUT names a git repository of GPT-NeoX, which is only read. With --check nothing is written: the exit code
is 1 if the page has other rows or columns than are measured; without the variable only that is looked at. In both cases
it is 1 if a difference is larger than allowed.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from tqdm import tqdm

from tests.neox_patch import checkouts, grid, runs
from tests.neox_patch.differences import KINDS, NONE, Cell, cells, kinds, number
from tests.neox_patch.test_widths import OURS, THEIRS

PATH = Path(__file__).resolve().parents[1] / "docs" / "neox_patch.md"
NUMBER = r"\d(?:\.\d+)?e[+-]\d+|(?<=\| )0(?= \|)"
INTRODUCTION = """# Patched GPT-NeoX checkouts, measured

`python -m tools.neox_patch` gives a GPT-NeoX checkout `head_dim` (neox_args_head_dim.md). Here it was applied to
several states of GPT-NeoX, and the patched and the plain checkout were both run on a CPU in fp32, not changed
otherwise: the functions of CUDA answer with the CPU, DeepSpeed's fused Adam is torch's AdamW, and flash-attn's
functions are written out in plain torch. Every number is a largest absolute difference, over one tensor-parallel rank
and two (where the heads split); logits are of order ten. Written by `python -m tools.neox_patch_table`; the
comparisons are tests (`make test-neox-patch`), which also hold tokens of cached generation, names, shapes and files
against each other.

"""
MODELS = f"""
With the new arguments: logits with this project's model / gradients of all parameters with its / logits with
transformers (Llama, Mistral and Qwen3 classes; {NONE} where they have no such model). Allowed are {number(OURS)},
{number(OURS)} and {number(THEIRS)}. An empty cell is a model that this state of GPT-NeoX cannot run for a reason of
its own: its RMSNorm takes one dimension.
"""
Found = Dict[str, Tuple[str, list, Dict[str, Cell]]]
"""{commit: (date, rows of the first table, cells of the second)}"""


def columns(repo: Optional[Path] = None) -> List[str]:
    """Commits, the newest first: those the repository has, or all."""
    return list(checkouts.STATES) if repo is None else checkouts.states(repo)


def geometry(name: str) -> str:
    """hidden / n / m / d of a configuration."""
    values = grid.WIDTHS[name]
    heads = values["num_attention_heads"]
    return f"{values['hidden_size']} / {heads} / {values.get('num_kv_heads') or heads} / {values['head_dim']}"


def section(found: Found) -> str:
    """The page."""
    heads = [f"{commit} ({date})" for commit, (date, _, _) in found.items()]
    lines = [
        "| what is compared | allowed |" + "".join(f" {head} |" for head in heads),
        "|---" * (len(heads) + 2) + "|",
    ]
    for number_, kind in enumerate(KINDS):
        values = [number(rows[number_][1]) for _, rows, _ in found.values()]
        lines.append(f"| {kind.name} | {number(kind.allowed)} | {' | '.join(values)} |")
    lines += ["", *MODELS.strip().split("\n"), ""]
    lines += ["| model | hidden / n / m / d |" + "".join(f" {commit} |" for commit in found)]
    lines += ["|---" * (len(heads) + 2) + "|"]
    for name in grid.WIDTHS:
        texts = [by_name[name].text if name in by_name else "" for _, _, by_name in found.values()]
        lines.append(f"| {name} | {geometry(name)} | {' | '.join(texts)} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def measured(repo: Path, folder: str) -> Found:
    """All numbers, with a progress bar; ten minutes on two cores."""
    truths, found = runs.Truths(Path(folder) / "truths"), {}
    for commit in tqdm(columns(repo), desc="states of GPT-NeoX"):
        state = runs.State(repo, commit, Path(folder) / commit, truths)
        found[commit] = (checkouts.commit_date(repo, commit), list(kinds(state)), cells(state))
    return found


def faults(found: Found) -> List[str]:
    """A line for each difference that is too large."""
    lines = []
    for commit, (_, rows, by_name) in found.items():
        lines += [f"{commit}, {name}: {number(value)} is too much" for name, value, allowed in rows if not allowed]
        lines += [f"{commit}, {name}: {cell.text} is too much" for name, cell in by_name.items() if not cell.allowed]
    return lines


def without_numbers(text: str) -> List[str]:
    """The lines of a page with every difference as #."""
    return re.sub(NUMBER, "#", text).split("\n")


def incomplete(page: str) -> List[str]:
    """What the page lacks of the rows and columns that there are, seen without measuring."""
    wanted = [*columns(), *(f"| {kind.name} |" for kind in KINDS)]
    wanted += [f"| {name} | {geometry(name)} |" for name in grid.WIDTHS]
    return [line for line in wanted if line not in page] + (
        [] if page.startswith(INTRODUCTION) else ["the introduction"]
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Measure, print, write unless --check."""
    parser = argparse.ArgumentParser(description="Measure patched checkouts of GPT-NeoX.")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page is complete")
    check, repo = parser.parse_args(arguments).check, checkouts.repository()
    page = PATH.read_text(encoding="utf-8") if PATH.exists() else ""
    if repo is None:
        print(f"{checkouts.VARIABLE} names no repository of GPT-NeoX: nothing is measured", file=sys.stderr)
        missing = incomplete(page) if check else [f"set {checkouts.VARIABLE}"]
        for line in missing:
            print(f"error: {PATH.name}: {line}", file=sys.stderr)
        return 1 if missing else 0
    with tempfile.TemporaryDirectory() as folder:
        found = measured(repo, folder)
    new, wrong = section(found), faults(found)
    print(new)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if check:
        return 1 if wrong or without_numbers(page) != without_numbers(new) else 0
    if not wrong:
        PATH.write_text(new, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
