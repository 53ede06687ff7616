"""python -m tools.golden_table: compare with every number that GPT-NeoX itself made, and write docs/golden.md.

With --check nothing is written; the exit code is 1 if a difference is larger than allowed.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Tuple

import numpy as np
import torch

from tests.golden import (
    cases,
    test_data_golden,
    test_dump_logits_golden,
    test_generation_golden,
    test_kinds_golden,
    test_training_golden,
)
from tests.golden.test_model_golden import RELATIVE_GRADIENT_NORM, run
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import FORWARD, LOSS, TRAJECTORY

PATH = Path(__file__).resolve().parents[1] / "docs" / "golden.md"
LOGITS = FORWARD[torch.float32]
KINDS = f"{len(test_kinds_golden.RESULTS['cases'])} kinds of models"
"""Every activation, norm, position embedding, residual form, head grouping and qk norm."""
TRAINING = "case6_train_llama_gqa"
TRAINING_LAYOUTS = {
    "TP 1": (1, dict(pipe_parallel_size=1)),
    "TP 2, ZeRO 1": (2, test_training_golden.TWO_RANKS[0]),
    "DP 2, ZeRO 1": (2, test_training_golden.TWO_RANKS[2]),
}
INTRODUCTION = """# Compared with GPT-NeoX

Each number was made by running GPT-NeoX (commit ea7aefd8) on a CPU in fp32, and is kept in `tests/golden`. The table
says how far this framework's numbers are from it: largest absolute difference, for gradient norms relative. Logits are
of the order of 6, losses of 7. Written by `python -m tools.golden_table`; the same comparisons are tests in
`tests/golden`.

| case | layout | quantity | largest difference | allowed |
|---|---|---|---|---|
"""


class Row(NamedTuple):
    """A line of the table: what was compared, how far apart it is, and how far it may be."""

    case: str
    layout: str
    quantity: str
    allowed: float
    difference: float = float("nan")

    @property
    def key(self) -> Tuple[str, str, str]:
        """What the line is about."""
        return self.case, self.layout, self.quantity


def planned() -> List[Row]:
    """Every line, in order, before anything is measured."""
    rows = []
    for case in cases.TP1:
        for tp in (1, 2) if case in cases.TP2 else (1,):
            layout = f"TP {tp}, PP 0 and 1"
            rows += [Row(case, layout, "logits", LOGITS), Row(case, layout, "loss", LOSS)]
            rows.append(Row(case, layout, "gradient norms", RELATIVE_GRADIENT_NORM))
        if case in cases.TP2:
            rows += [Row(case, f"files of TP {a} at TP {3 - a}", "logits", LOGITS) for a in (1, 2)]
        if case in test_generation_golden.CASES:
            rows.append(Row(case, "TP 1, PP 0", "generated tokens that differ", 0))
    rows += [Row(KINDS, "TP 1, PP 0 or 1", "logits", LOGITS), Row(KINDS, "TP 1, PP 0 or 1", "first loss", LOSS)]
    rows.append(Row(KINDS, "TP 1, PP 0 or 1", "losses of 3 steps", TRAJECTORY))
    for layout in TRAINING_LAYOUTS:
        rows.append(Row(TRAINING, layout, "tokens of 8 batches that differ", 0))
        rows.append(Row(TRAINING, layout, "losses of 8 steps", LOSS))
    return [*rows, Row(TRAINING, "data set", "index-map files that differ", 0)]


def measured(folder: Path) -> List[Row]:
    """The planned lines with their differences; takes about a minute."""
    found: Dict[Tuple[str, str, str], float] = {}
    for measure in (_models, _other_layouts, _generation, _kinds, _training, _index_maps):
        place = folder / measure.__name__
        place.mkdir()
        found.update(measure(place))
    return [row._replace(difference=float(found[row.key])) for row in planned()]


def _models(folder: Path) -> Dict[tuple, float]:
    found: Dict[tuple, float] = {}
    for tp, names in ((1, cases.TP1), (2, cases.TP2)):
        for differences in run_distributed(tp, _model_differences, names, tmp_path=folder):
            for (case, quantity), difference in differences.items():
                key = case, f"TP {tp}, PP 0 and 1", quantity
                found[key] = max(found.get(key, 0.0), difference)
    return found


def _model_differences(rank: int, world_size: int, names: List[str]) -> Dict[Tuple[str, str], float]:
    """On one rank: the larger difference of pipe_parallel_size 0 and 1."""
    found: Dict[Tuple[str, str], float] = {}
    for case in names:
        golden_logits, golden_loss, golden_norms = cases.expected(case, world_size, rank)
        for pp in (0, 1):
            args = cases.arguments(case, world_size, pp, global_num_gpus=world_size)
            logits, loss, parameters = run(args, case, world_size, rank)
            norms = [abs(parameters[name].grad.norm().item() / g["norm"] - 1) for name, g in golden_norms.items()]
            logit_difference = (logits[:, ::4] - golden_logits).abs().max().item()
            values = {"logits": logit_difference, "loss": abs(loss - golden_loss), "gradient norms": max(norms)}
            for quantity, value in values.items():
                found[case, quantity] = max(found.get((case, quantity), 0.0), value)
    return found


def _other_layouts(folder: Path) -> Dict[tuple, float]:
    layouts = test_dump_logits_golden.OTHER_LAYOUT
    results = {}
    for ranks in (1, 2):
        results.update(test_dump_logits_golden.measured(layouts, ranks, folder))
    return {
        (case, f"files of TP {tp} at TP {ranks}", "logits"): results[case, tp, ranks, sequential][0]
        for case, tp, ranks, sequential in layouts
    }


def _generation(folder: Path) -> Dict[tuple, float]:
    (texts,) = run_distributed(1, test_generation_golden.all_texts, 1, 0, tmp_path=folder)
    found = {}
    for case in test_generation_golden.CASES:
        golden = [continuation for _, continuation in test_generation_golden.golden_texts(case)]
        ways = [np.not_equal(tokens, golden).sum() for tokens in texts[case]]
        found[case, "TP 1, PP 0", "generated tokens that differ"] = max(ways)
    return found


def _kinds(folder: Path) -> Dict[tuple, float]:
    (results,) = run_distributed(1, test_kinds_golden.all_results, tmp_path=folder)
    apart = [test_kinds_golden.differences(name, result) for name, result in results.items()]
    layout = "TP 1, PP 0 or 1"
    return {
        (KINDS, layout, "logits"): max(logits for logits, _ in apart),
        (KINDS, layout, "first loss"): max(losses[0] for _, losses in apart),
        (KINDS, layout, "losses of 3 steps"): max(losses.max() for _, losses in apart),
    }


def _training(folder: Path) -> Dict[tuple, float]:
    for source in (test_training_golden.HERE / "data_index").glob("enwik8_tiny_*"):
        shutil.copy(source, folder)
    golden = np.load(test_training_golden.HERE / "data_index" / "case6_batches.npy")
    found = {}
    for name, (ranks, layout) in TRAINING_LAYOUTS.items():
        train: Callable = test_training_golden.train_as_gpt_neox
        runs = [results[0] for results in run_distributed(ranks, train, str(folder), [layout], tmp_path=folder)]
        wrong = sum((tokens != golden[:, row : row + tokens.shape[1]]).sum() for _, (row, tokens) in runs)
        losses = max(test_training_golden.largest_loss_difference(steps) for steps, _ in runs)
        found[TRAINING, name, "tokens of 8 batches that differ"] = wrong
        found[TRAINING, name, "losses of 8 steps"] = losses
    return found


def _index_maps(folder: Path) -> Dict[tuple, float]:
    name, golden = test_data_golden.NAME, test_data_golden.GOLDEN
    for ending in (".bin", ".idx"):
        shutil.copy(golden / f"{name}{ending}", folder)
    for micro_batch in (4, 8):
        args = test_data_golden.case6_args(str(folder / name), train_micro_batch_size_per_gpu=micro_batch)
        test_data_golden.build_train_valid_test_data_iterators(args)
    maps = sorted(golden.glob("*.npy"))
    wrong = [path for path in maps if "indexmap" in path.name and not _same(path, folder / path.name)]
    return {(TRAINING, "data set", "index-map files that differ"): len(wrong)}


def _same(first: Path, second: Path) -> bool:
    return second.exists() and first.read_bytes() == second.read_bytes()


def text_of(rows: List[Row]) -> str:
    """The page."""
    lines = [f"| {' | '.join(row.key)} | {row.difference:.1e} | {row.allowed:.0e} |" for row in rows]
    exact = [line.replace("0.0e+00", "0").replace("0e+00", "0") for line in lines]
    return INTRODUCTION + "\n".join(exact) + "\n"


def main() -> int:
    """Measure, print, write unless --check; 1 if anything differs by more than allowed."""
    parser = argparse.ArgumentParser(description="Compare with the numbers that GPT-NeoX made.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    text = text_of(rows)
    print(text)
    wrong = [row for row in rows if not row.difference <= row.allowed]
    for row in wrong:
        print(f"error: {', '.join(row.key)}: {row.difference:.2g} is more than {row.allowed:g}", file=sys.stderr)
    if not check and not wrong:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
