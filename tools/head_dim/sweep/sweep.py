"""A study from its file to its results."""

import os
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional

from tools.head_dim.sweep import data, records, results
from tools.head_dim.sweep.plan import PlannedVariant, Run, plan, runs
from tools.head_dim.sweep.progress import View
from tools.head_dim.sweep.runner import execute
from tools.head_dim.sweep.study import Study

DATA = "data"


@dataclass(frozen=True)
class Sweep:
    """A study with its data made and its variants solved for. identity: tells its data from other data."""

    study: Study
    out: str
    planned: List[PlannedVariant]
    runs: List[Run]
    identity: Dict[str, Any]

    @classmethod
    def of(cls, study: Study, out: str, data_dir: Optional[str] = None) -> "Sweep":
        """Raises ConfigError with the problems of all variants, or DataError."""
        os.makedirs(out, exist_ok=True)
        named = data.prepare(study, out, data_dir or os.path.join(out, DATA))
        from_here = {
            key: value if key == "tokenizer_type" else os.path.join(out, value) for key, value in named.items()
        }
        solved = plan(study, from_here)
        planned = [replace(variant, settings={**variant.settings, **named}) for variant in solved]
        return cls(study, out, planned, runs(study, planned), data.identity(planned[0].settings, out))

    def collect(self) -> Dict[str, Any]:
        """Write results.json of what is there, and return it.

        Raises ConfigError if a run there had other settings: its figures are not this study's.
        """
        records.refuse_changed(self.out, self.runs, self.identity, discard=False)
        found = results.collect(self.out, self.study, self.planned, self.runs)
        results.write(self.out, found)
        return found


def run_study(
    study: Study,
    out: str,
    jobs: int = 1,
    data_dir: Optional[str] = None,
    discard_changed: bool = False,
    keep_checkpoints: bool = False,
) -> Dict[str, Any]:
    """Train what is not trained yet and write `out`/results.json; returns the results, as `api` describes them.

    data_dir: where prepared data is kept; `out`/data by default. Studies that read the same can share it.

    Raises ConfigError and DataError for what is the user's to fix; a run that fails is only recorded.
    """
    sweep = Sweep.of(study, out, data_dir)
    records.refuse_changed(out, sweep.runs, sweep.identity, discard_changed)
    with View(out) as view:
        execute(out, sweep.runs, sweep.identity, jobs, keep_checkpoints, view)
    return sweep.collect()
