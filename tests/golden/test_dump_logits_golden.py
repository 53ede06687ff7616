"""tools/ckpts/dump_logits.py gives GPT-NeoX's logits from GPT-NeoX's files, at their own and at the other layout."""

import shutil

import numpy as np
import pytest
import torch

from tests.golden import cases
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import FORWARD, LOSS
from tools.ckpts import dump_logits as tool

# (case, ranks the files are split over, ranks that compute, sequential form)
AS_SAVED = [(case, 1, 1, form) for case in cases.TP1 for form in (False, True)]
AS_SAVED += [(case, 2, 2, form) for case in cases.TP2 for form in (False, True)]
OTHER_LAYOUT = [(case, 2, 1, True) for case in cases.TP2] + [(case, 1, 2, False) for case in cases.TP2]


def write_files(case, tp, sequential, folder):
    """The case's checkpoint as GPT-NeoX has it on disk; without rank files in the layered form."""
    (folder / "configs").mkdir(parents=True)
    shutil.copy(cases.DATA / case / "config.yml", folder / "configs")
    if not sequential:
        cases.write_checkpoint(case, tp, folder)
        return
    for rank in range(tp):
        layers = {index: cases.layer_state(case, tp, rank, index) for index in (cases.EMBEDDING, 2, 3, 5, cases.HEAD)}
        module = {
            f"sequential.{index}.{name}": value for index, state in layers.items() for name, value in state.items()
        }
        state = {"module": module, "iteration": 0, "np_rng_state": np.random.get_state()}
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")


def compute_all(rank, world_size, jobs):
    """(largest difference of logits, of loss) from the golden ones for each (case, files' tp, job)."""
    results = []
    for case, tp, job in jobs:
        loss = tool.compute(job, tool.load_tokens(str(cases.DATA / case / "input_ids.npy")))
        if rank == 0:
            logits, golden_loss, _ = cases.expected(case, tp)
            written = torch.from_numpy(np.load(job["out"]))
            results.append(((written[:, ::4] - logits).abs().max().item(), abs(loss - golden_loss)))
    return results


def measured(layouts, ranks, folder):
    """The results of `compute_all` for those of `layouts` that `ranks` ranks compute, {layout: (logits, loss)}."""
    jobs, wanted = [], [layout for layout in layouts if layout[2] == ranks]
    for number, (case, tp, _, sequential) in enumerate(wanted):
        place = folder / f"{ranks}_{number}"
        write_files(case, tp, sequential, place)
        tokens = tool.load_tokens(str(cases.DATA / case / "input_ids.npy"))
        job = tool.plan(str(place), tokens, str(place / "out.npy"), model_parallel_size=ranks, labels_from_tokens=True)
        jobs.append((case, tp, job))
    results = run_distributed(ranks, compute_all, jobs, tmp_path=folder)[0]
    return dict(zip(wanted, results, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_and_loss_are_those_of_gpt_neox(ranks, tmp_path):
    results = measured(AS_SAVED + OTHER_LAYOUT, ranks, tmp_path)
    assert len(results) == (11 if ranks == 1 else 9)
    wrong = {layout: found for layout, found in results.items() if found[0] > FORWARD[torch.float32] or found[1] > LOSS}
    assert not wrong
