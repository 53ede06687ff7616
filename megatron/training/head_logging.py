"""log_head_diagnostics: every N steps, what the attention heads did in that step."""

import json
import os
from typing import List, Optional, Set

from megatron.head_diagnostics import Finding, HeadDiagnostics, HeadReport, findings
from megatron.head_diagnostics.report import plain
from megatron.logging.records import run_folder

FILE_NAME = "head_diagnostics.jsonl"
PICTURE = "head_diagnostics.png"


class HeadLog:
    """Looks at a step between its backward pass and its update, and writes on rank 0.

    The run's folder gets a line of head_diagnostics.jsonl per look and a picture of the last one. The log names each
    rule of megatron.head_diagnostics.checklist when heads first break it. TensorBoard and W&B get the mean and the
    extremes of each layer's figures, and the picture.
    """

    def __init__(self, neox_args, engine):
        self._every: Optional[int] = neox_args.log_head_diagnostics
        self._folder = run_folder(neox_args)
        self._rank = neox_args.rank
        self._wanted = False
        self._known: Set[str] = set()
        if self._every:
            self._diagnostics = HeadDiagnostics(engine.module)
            # The one place that both of DeepSpeed's engines pass between the last backward and the update.
            self._take_model_step = engine._take_model_step
            engine._take_model_step = self._before_update

    def want(self, iteration: int) -> None:
        """Say which step comes next."""
        self._wanted = bool(self._every) and iteration % self._every == 0
        if self._wanted:
            self._diagnostics.begin()

    def write(self, iteration: int, logger) -> None:
        """After a step; on every rank."""
        if not self._wanted:
            return
        self._wanted = False
        report = self._diagnostics.report(iteration)
        if self._rank != 0:
            return
        found = findings(report)
        if self._folder:
            self._keep(report, found)
            logger.picture(iteration, "heads", os.path.join(self._folder, PICTURE))
        logger.scalars(iteration, scalars_of(report))
        for finding in found:
            if finding.rule not in self._known:
                self._known.add(finding.rule)
                logger.message(f"iteration {iteration} | {finding}")

    def _before_update(self, *args, **kwargs):
        if self._wanted:
            self._diagnostics.measure()
        return self._take_model_step(*args, **kwargs)

    def _keep(self, report: HeadReport, found: List[Finding]) -> None:
        from megatron.head_diagnostics.picture import draw_report

        os.makedirs(self._folder, exist_ok=True)
        line = json.dumps(plain({**report.to_dict(), "findings": [vars(finding) for finding in found]}))
        with open(os.path.join(self._folder, FILE_NAME), "a", encoding="utf-8") as file:
            file.write(line + "\n")
        draw_report(report, os.path.join(self._folder, PICTURE), f"iteration {report.iteration}")


def scalars_of(report: HeadReport):
    """{heads/FIGURE_{mean,min,max}/layer_N: number}"""
    scalars = {}
    for layer in report.layers:
        for name, values in layer.figures.items():
            for kind, value in (("mean", sum(values) / len(values)), ("min", min(values)), ("max", max(values))):
                scalars[f"heads/{name}_{kind}/layer_{layer.layer}"] = value
    return scalars
