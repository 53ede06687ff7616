"""What eval.py does: check the request, measure, print and keep the results."""

import datetime
import json
import os
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Optional

from tqdm import tqdm

from megatron.errors import ConfigError
from megatron.evaluation.completion import complete
from megatron.evaluation.perplexity import read_text, text_perplexity
from megatron.evaluation.scoring import score
from megatron.evaluation.service import with_all_ranks
from megatron.text_generation.collective import from_rank_0_when_ready, is_rank_0
from megatron.text_generation.console import show
from megatron.text_generation.stream import context_limit

_WORK = {"score": score, "complete": complete}


class Evaluation:
    """One request, checked before a large model takes minutes to load; all ranks must make it.

    Raises ConfigError with every bad setting, or for a task that is not known; DataError for a text that cannot be
    read.
    """

    def __init__(self, neox_args):
        self._args = neox_args
        problems = _problems(neox_args)
        if problems:
            raise ConfigError(problems)
        self._text: Optional[str] = None
        self._tasks = None
        from_rank_0_when_ready(self._prepare)

    def _prepare(self) -> None:
        """Rank 0's part: the harness takes many seconds to be imported and to find its tasks."""
        args = self._args
        folder = Path(f"{args.eval_results_prefix}_").parent
        if not os.access(folder, os.W_OK):
            raise ConfigError(
                f"eval_results_prefix={args.eval_results_prefix}: no folder {folder} to write to; make it"
            )
        if args.perplexity_file:
            self._text = read_text(args.perplexity_file)
        if args.eval_tasks:
            from megatron.evaluation.adapter import Tasks

            self._tasks = Tasks(args)

    def run(self, model) -> Optional[Dict[str, Any]]:
        """Measure with a model (or its InferenceRunner); returns what was written, on rank 0. All ranks call it."""
        return with_all_ranks(self._measure, partial(_perform, self._args, model))

    def _measure(self, call) -> Dict[str, Any]:
        results: Dict[str, Any] = {}
        if self._tasks is not None:
            results = self._tasks.run(call)
        if self._text is not None:
            figures = text_perplexity(self._args, self._text, partial(call, "score"), self._args.perplexity_stride)
            results["perplexity"] = {"file": self._args.perplexity_file, **figures}
            results.setdefault("config", {"load": self._args.load, "iteration": self._args.iteration})
        self._report(results)
        return results

    def _report(self, results: Dict[str, Any]) -> None:
        if self._tasks is not None:
            from megatron.evaluation.adapter import tables

            show(tables(results))
        if "perplexity" in results:
            show(perplexity_line(results["perplexity"]))
        path = write_results(results, self._args.eval_results_prefix)
        log_results(self._args, results)
        show(f"results written to {path}")


def _perform(neox_args, model, name: str, requests: List[Any]) -> List[Any]:
    """One piece of work on all ranks, with a progress bar on rank 0."""
    size = neox_args.eval_batch_size or neox_args.train_micro_batch_size_per_gpu
    with tqdm(total=len(requests), desc=name, disable=None if is_rank_0() else True) as bar:
        return _WORK[name](neox_args, model, requests, size, on_progress=bar.update)


def _problems(neox_args) -> List[str]:
    problems = []
    if not neox_args.eval_tasks and not neox_args.perplexity_file:
        problems.append("eval_tasks is not set; name tasks with --eval_tasks TASK..., or a text with --perplexity FILE")
    for name in ("eval_num_fewshot", "eval_limit", "eval_batch_size"):
        value, least = getattr(neox_args, name), 0 if name == "eval_num_fewshot" else 1
        if value is not None and value < least:
            problems.append(f"{name}={value} must be at least {least}")
    stride, length = neox_args.perplexity_stride, context_limit(neox_args)
    if stride is not None and not 1 <= stride <= length:
        problems.append(f"perplexity_stride={stride} must be from 1 to the context length, {length}")
    folder = neox_args.eval_task_folder
    if folder is not None and not os.path.isdir(folder):
        problems.append(f"eval_task_folder={folder} is no folder; name one with YAML files of tasks")
    return problems


def perplexity_line(figures: Dict[str, Any]) -> str:
    """The figures of a text in words."""
    return (
        f"{figures['file']}: loss {figures['loss']:.4f} nats per token | perplexity {figures['perplexity']:.4g} | "
        f"{figures['bits_per_byte']:.4f} bits per byte | {figures['tokens']:,} tokens, {figures['bytes']:,} bytes, "
        f"{figures['windows']:,} window{'' if figures['windows'] == 1 else 's'} of {figures['context_length']} tokens"
    )


def write_results(results: Dict[str, Any], prefix: str = "") -> str:
    """Write `[prefix_]eval_results_<date>.json`, all of it or nothing; returns its path."""
    name = f"eval_results_{datetime.datetime.now():%m-%d-%Y-%H-%M-%S}.json"
    path = Path(f"{prefix}_{name}" if prefix else name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(results, indent=4, default=_plain), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return str(path)


def log_results(neox_args, results: Dict[str, Any]) -> None:
    """Each figure as eval/<task>_<metric> to W&B and TensorBoard, where they are used."""
    sinks = []
    if neox_args.use_wandb:
        from megatron.logging.wandb import WandbSink

        sinks.append(WandbSink(neox_args))
    if neox_args.tensorboard_dir:
        from megatron.logging.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(neox_args.tensorboard_dir))
    for sink in sinks:
        sink.write(scalars_of(results), neox_args.iteration or 0)
        sink.close()


def scalars_of(results: Dict[str, Any]) -> Dict[str, float]:
    """{eval/<task>_<metric>: number} of the tasks and of the text."""
    tasks = {**results.get("results", {}), "perplexity": results.get("perplexity", {})}
    return {
        f"eval/{task}_{metric}": float(value)
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _plain(value: Any) -> Any:
    """What JSON has no form for: numbers of numpy's as numbers, sets as lists, anything else as text."""
    if hasattr(value, "item"):
        return value.item()
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)
