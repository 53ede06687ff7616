"""One logger for a training run: it averages steps into logged steps and hands them to everything that shows them."""

import os
from typing import Any, Dict, Optional

import torch

from megatron.logging.console import Console
from megatron.logging.curve import draw_loss_curve
from megatron.logging.records import RunLog, read_records, run_folder

_METRIC_NAMES = {
    "loss": "train/lm_loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "loss_scale": "train/loss_scale",
    "tokens_per_second": "runtime/tokens_per_second",
    "tflops": "runtime/tflops_per_device",
    "mfu": "runtime/mfu",
    "seconds": "runtime/seconds_per_step",
    "data_ms": "runtime/data_ms_per_step",
}
"""Names in TensorBoard and W&B; the train/ ones are GPT-NeoX's."""


class TrainingLogger:
    """Shows and keeps the figures of a run. Only rank 0 writes (and every rank's W&B run, if asked for).

    `flops_per_token` (forward and backward, the whole model) turns speed into TFLOP/s per device, and
    `peak_theoretical_tflops` that into MFU. `iteration` is where a resumed run starts.
    """

    def __init__(
        self,
        neox_args,
        flops_per_token: Optional[float] = None,
        iteration: int = 0,
        interactive: Optional[bool] = None,
    ):
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0
        self._devices = torch.distributed.get_world_size() if distributed else 1
        self._args = neox_args
        self._flops_per_token = flops_per_token
        self._interval = _Interval()
        self._console = self._log = None
        self._sinks = []
        folder = run_folder(neox_args)
        if self._rank == 0:
            self._console = Console(neox_args.train_iters or 0, iteration, interactive)
            self._log = RunLog(folder) if folder else None
            if neox_args.tensorboard_dir:
                from megatron.logging.tensorboard import TensorBoardSink

                self._sinks.append(TensorBoardSink(neox_args.tensorboard_dir))
        if neox_args.use_wandb and (self._rank == 0 or neox_args.wandb_init_all_ranks):
            from megatron.logging.wandb import WandbSink

            self._sinks.append(WandbSink(neox_args, self._rank))

    def log_step(self, iteration: int, metrics: Dict[str, Any]) -> None:
        """Count one optimizer step.

        metrics: loss (nats per token), lr, seconds; optional grad_norm, loss_scale, skipped, data_seconds (waited for
        the data, on this rank), and `scalars`, a dict of further named figures. Every log_interval steps, and at the
        last one, the means since the last logged step are shown and written.
        """
        self._interval.add(metrics)
        if self._console is not None:
            self._console.advance(iteration)
        if iteration % self._args.log_interval and iteration != self._args.train_iters:
            return
        record = self._record(iteration, metrics)
        self._interval = _Interval()
        if self._console is not None:
            self._console.step(record)
        self._write(record, metrics.get("scalars") or {})

    def log_eval(self, iteration: int, metrics: Dict[str, float], split: str = "valid") -> None:
        """Show and keep an evaluation: metrics holds loss and ppl, perhaps char_ppl."""
        names = {"valid": "validation", "test": "test"}
        shown = f"{names[split]} loss {metrics['loss']:.4f} | perplexity {metrics['ppl']:.4g}"
        if "char_ppl" in metrics:
            shown += f" | perplexity per character {metrics['char_ppl']:.4g}"
        self.message(f"iteration {iteration} | {shown}")
        if self._log is not None:
            self._log.write({"iteration": iteration, **{f"{split}_{key}": value for key, value in metrics.items()}})
        curves = {"loss": "lm_loss", "ppl": "lm_loss_ppl", "char_ppl": "lm_loss_char_lvl_ppl"}
        scalars = {f"{names[split]}/{curves[key]}": value for key, value in metrics.items()}
        for sink in self._sinks:
            sink.write(scalars, iteration)

    def scalars(self, iteration: int, scalars: Dict[str, float]) -> None:
        """Points of curves that only TensorBoard and W&B show."""
        for sink in self._sinks:
            sink.write(scalars, iteration)

    def picture(self, iteration: int, name: str, path: str) -> None:
        """A PNG file, for TensorBoard and W&B."""
        for sink in self._sinks:
            sink.picture(name, path, iteration)

    def message(self, text: str) -> None:
        """One line on rank 0's console."""
        if self._console is not None:
            self._console.message(text)

    def close(self) -> None:
        """Close everything and draw loss_curve.png into the run folder."""
        if self._console is not None:
            self._console.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []
        if self._log is not None:
            self._log.close()
            folder = os.path.dirname(self._log.path)
            draw_loss_curve(read_records(self._log.path), folder, title=_title(folder))
            self._log = None

    def _record(self, iteration: int, metrics: Dict[str, Any]) -> Dict[str, Any]:
        interval = self._interval
        seconds = interval.seconds / interval.steps
        tokens_per_second = self._args.train_batch_size * self._args.seq_length / max(seconds, 1e-9)
        record = {
            "iteration": iteration,
            "loss": interval.mean_loss,
            "lr": metrics["lr"],
            "grad_norm": metrics.get("grad_norm"),
            "tokens_per_second": tokens_per_second,
            "tflops": None,
            "seconds": seconds,
            "data_ms": 1e3 * interval.data_seconds / interval.steps,
        }
        if self._flops_per_token is not None:
            record["tflops"] = tokens_per_second * self._flops_per_token / self._devices / 1e12
            if self._args.peak_theoretical_tflops:
                record["mfu"] = record["tflops"] / self._args.peak_theoretical_tflops
        if metrics.get("loss_scale") is not None:
            record["loss_scale"] = metrics["loss_scale"]
        if interval.skipped:
            record["skipped_steps"] = interval.skipped
        return record

    def _write(self, record: Dict[str, Any], extra: Dict[str, float]) -> None:
        if self._log is not None:
            self._log.write({**record, **extra})
        if self._sinks:
            known = {key: record.get(key) for key in _METRIC_NAMES}
            scalars = {_METRIC_NAMES[key]: value for key, value in known.items() if value is not None}
            for sink in self._sinks:
                sink.write({**scalars, **extra}, record["iteration"])


class _Interval:
    """Sums since the last logged step. The loss of a skipped step (fp16 overflow) does not count."""

    def __init__(self):
        self.steps = self.counted = self.skipped = 0
        self.loss = self.seconds = self.data_seconds = self.last_loss = 0.0

    def add(self, metrics: Dict[str, Any]) -> None:
        self.steps += 1
        self.seconds += metrics["seconds"]
        self.data_seconds += metrics.get("data_seconds", 0.0)
        self.last_loss = metrics["loss"]
        if metrics.get("skipped"):
            self.skipped += 1
        else:
            self.counted += 1
            self.loss += metrics["loss"]

    @property
    def mean_loss(self) -> float:
        return self.loss / self.counted if self.counted else self.last_loss


def _title(folder: str) -> str:
    return f"loss of {os.path.basename(os.path.normpath(folder))}"
