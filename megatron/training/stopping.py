"""Why a run stops before train_iters: a signal, or losses that are no numbers."""

import math
import signal
import threading
from typing import Any, Dict, Optional

import torch
import torch.distributed as dist

from megatron import mpu
from megatron.errors import NeoXError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
MAX_BAD_LOSSES = 3
"""Losses in a row that are not finite (outside fp16's search for a loss scale) before training stops."""
MAX_SKIPPED_STEPS = 50
"""Skipped steps in a row before training stops; fp16's dynamic loss scale needs some at the start."""


class TrainingError(NeoXError):
    """Training cannot go on: the loss or the gradients have not been finite for several steps."""


class StopSignal:
    """While active, the first SIGTERM, SIGINT or SIGUSR1 asks for a stop after the current step.

    A second one of the same kind acts as it would have without this. Which ranks get the signal, and when, differs;
    `agreed()` is a collective after which all ranks know.
    """

    def __init__(self):
        self._received: Optional[int] = None
        self._before: Dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number, frame) -> None:
        self._received = number
        signal.signal(number, self._before.pop(number, signal.SIG_DFL))

    def agreed(self) -> Optional[str]:
        """The name of a signal that some rank has received, or None. Called on every rank at the same place."""
        number = self._received or 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor(number, device=mpu.current_device())
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            number = int(flag.item())
        return signal.Signals(number).name if number else None


class Health:
    """Counts steps in a row that went wrong.

    A step whose gradients are not finite leaves the weights alone where DeepSpeed or gradients.py can see it before
    the update (fp16, bf16, fp32 without ZeRO); with fp32 and ZeRO the weights become NaN, and so does every later loss.
    """

    def __init__(self, dynamic_loss_scale: bool):
        self._dynamic = dynamic_loss_scale
        self._bad_losses = self._skipped = 0

    @property
    def is_good(self) -> bool:
        """The last step had finite numbers; nothing else is worth a checkpoint."""
        return self._bad_losses == 0

    def check(self, iteration: int, metrics: Dict[str, Any]) -> Optional[str]:
        """What to tell about this step, None if all is well. Raises TrainingError when it has gone on too long."""
        self._skipped = self._skipped + 1 if metrics["skipped"] else 0
        finite = math.isfinite(metrics["loss"])
        searching = metrics["skipped"] and self._dynamic
        self._bad_losses = 0 if finite else self._bad_losses + (0 if searching else 1)
        if self._bad_losses >= MAX_BAD_LOSSES or self._skipped >= MAX_SKIPPED_STEPS:
            raise TrainingError(self._verdict(iteration))
        if not finite:
            return f"iteration {iteration}: the loss is {metrics['loss']}"
        if metrics["skipped"] and not self._dynamic:
            return f"iteration {iteration}: a gradient is not finite, so the weights were left as they are"
        return None

    def _verdict(self, iteration: int) -> str:
        if self._bad_losses >= MAX_BAD_LOSSES:
            what = f"the loss has not been finite for {self._bad_losses} steps in a row"
        else:
            what = f"{self._skipped} steps in a row were skipped, because gradients were not finite"
        return (
            f"iteration {iteration}: {what}; no checkpoint of this state is written. Resume from the last one with a "
            "lower lr, a longer warmup, gradient_clipping, or bfloat16 instead of fp16"
        )
