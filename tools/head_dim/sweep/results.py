"""The figures of a study's runs, read from their folders, as the mapping that `api` describes."""

import json
import math
import os
from statistics import median
from typing import Any, Dict, List, Optional

from megatron.training.head_logging import FILE_NAME as HEADS
from tools.bench.report import machine
from tools.head_dim.sweep import records
from tools.head_dim.sweep.plan import PlannedVariant, Run
from tools.head_dim.sweep.statistics import Estimate, estimate, paired
from tools.head_dim.sweep.study import Study

RESULTS = "results.json"
DIGITS = 6
BETTER, WORSE, OPEN = "lower", "higher", "not decided"


def collect(out: str, study: Study, planned: List[PlannedVariant], runs: List[Run]) -> Dict[str, Any]:
    """The results, whether or not all runs are done."""
    found = [_run(out, run) for run in runs]
    return {
        "study": _study(study),
        "machine": machine(),
        "variants": [_variant(variant) for variant in planned],
        "runs": found,
        "ranking": ranking(study.baseline, [variant.name for variant in planned], found),
    }


def write(out: str, results: Dict[str, Any]) -> str:
    """Whole or not at all; returns the path."""
    path = os.path.join(out, RESULTS)
    with open(f"{path}.writing", "w", encoding="utf-8") as file:
        json.dump(results, file)
    os.replace(f"{path}.writing", path)
    return path


def last_losses(runs: List[Dict[str, Any]], variant: str) -> Dict[int, float]:
    """{seed: last validation loss} of a variant's finished runs."""
    return {
        run["seed"]: run["validation"]["loss"][-1]
        for run in runs
        if run["variant"] == variant and run["status"] == records.FINISHED and run["validation"]["loss"]
    }


def ranking(baseline: str, variants: List[str], runs: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """By the mean of the last validation loss, lowest first; a variant without a finished run is left out."""
    losses = {name: last_losses(runs, name) for name in variants}
    rows = []
    for name in variants:
        if not losses[name]:
            continue
        own = estimate(list(losses[name].values()))
        difference = paired(losses[name], losses[baseline]) if name != baseline else None
        rows.append(
            {
                "variant": name,
                "mean": own.mean,
                "interval": own.interval,
                "seeds": sorted(losses[name]),
                "difference": difference.mean if difference else None,
                "difference_interval": difference.interval if difference else None,
                "verdict": _verdict(difference),
            }
        )
    return sorted(rows, key=lambda row: row["mean"])


def _verdict(difference: Optional[Estimate]) -> Optional[str]:
    if difference is None:
        return None
    if difference.interval is None or difference.interval[0] <= 0 <= difference.interval[1]:
        return OPEN
    return BETTER if difference.mean < 0 else WORSE


def _study(study: Study) -> Dict[str, Any]:
    return {
        "name": study.name,
        "about": study.about,
        "baseline": study.baseline,
        "seeds": list(study.seeds),
        "at_equal": study.at_equal,
        "adjust": study.adjust,
        "data": vars(study.data) if study.data else None,
        "settings": study.settings,
    }


def _variant(variant: PlannedVariant) -> Dict[str, Any]:
    return {
        "name": variant.name,
        "changes": variant.variant.changes,
        "settings": variant.settings,
        "widths": variant.widths,
        "parameters": variant.parameters,
        "flops_per_token": variant.flops_per_token,
        "memory_estimate_bytes": variant.memory,
    }


def _run(out: str, run: Run) -> Dict[str, Any]:
    state = records.read_state(out, run)
    log = records.log_of(out, run) if state else []
    train = [record for record in log if "loss" in record]
    valid = [record for record in log if "valid_loss" in record]
    return {
        "variant": run.variant.name,
        "seed": run.seed,
        "status": state.status if state else records.NOT_STARTED,
        "error": state.error if state else None,
        "train": {
            "step": [record["iteration"] for record in train],
            **{key: [_short(record.get(key)) for record in train] for key in ("loss", "grad_norm", "lr")},
        },
        "validation": {
            "step": [record["iteration"] for record in valid],
            "loss": [_short(record["valid_loss"]) for record in valid],
        },
        "tokens_per_second": _speed(train),
        "peak_rss_bytes": state.peak_rss_bytes or None if state else None,
        "seconds": state.seconds if state else None,
        "threads": state.threads[-1] if state and state.threads else None,
        "heads": _heads(os.path.join(out, run.folder, HEADS)) if state else [],
    }


def _speed(train: List[Dict[str, Any]]) -> Optional[float]:
    """The median logged interval; the first one warms up."""
    speeds = [record["tokens_per_second"] for record in train[1:] or train]
    return _short(median(speeds)) if speeds else None


def _heads(path: str) -> List[Dict[str, Any]]:
    """The looks at a run's heads. A run that went on from a checkpoint has looked again: the later look counts."""
    if not os.path.exists(path):
        return []
    looks: Dict[int, Dict[str, Any]] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                look = json.loads(line)
            except ValueError:  # the run was killed while it wrote
                continue
            looks[look["iteration"]] = _shortened(look)
    return [looks[iteration] for iteration in sorted(looks)]


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return _short(value)


def _short(value: Any) -> Any:
    """Floats with six digits, None where they are not finite."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
