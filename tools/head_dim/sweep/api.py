"""For other tools: read a study, run it, read what came out.

The results of a study, DIR/results.json:

    {"study": {"name", "about", "baseline", "seeds", "at_equal", "adjust", "settings"},
     "machine": {...},
     "variants": [{"name", "changes": {...}, "settings": {...}, "widths": {...}, "parameters", "flops_per_token",
                   "memory_estimate_bytes"}],
     "runs": [{"variant", "seed", "status": "finished" | "diverged" | "failed" | "unfinished" | "not started", "error",
               "train": {"step": [...], "loss": [...], "grad_norm": [...], "lr": [...]},
               "validation": {"step": [...], "loss": [...]},
               "tokens_per_second", "peak_rss_bytes", "seconds",
               "heads": [{"iteration", "tokens", "layers": [{"layer", "head_dim", "figures": {name: [one per head]}}],
                          "findings": [...]}]}],
     "ranking": [{"variant", "mean", "interval": [low, high], "seeds": [...], "difference", "difference_interval",
                  "verdict"}]}

`settings` are complete, as the run's YAML has them; `changes` are those of the study. heads are the looks of
log_head_diagnostics, the last one last. Losses are nats per token, None where they are not finite. ranking: by the last
validation loss, best first; difference: to the baseline, paired by seed; None where there are too few seeds.
"""

import json
import os
from typing import Any, Dict

from megatron.errors import DataError
from tools.head_dim.sweep.results import RESULTS
from tools.head_dim.sweep.study import Study, load_study, study_of
from tools.head_dim.sweep.sweep import run_study

__all__ = ["Study", "load_study", "read_results", "run_study", "study_of"]


def read_results(folder: str) -> Dict[str, Any]:
    """What a sweep wrote there. Raises DataError."""
    path = os.path.join(folder, RESULTS)
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: no results of a sweep can be read ({error})") from None
