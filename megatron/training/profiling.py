"""torch.profiler around the steps that `profile`, `profile_step_start` and `profile_step_stop` name."""

from contextlib import contextmanager
from typing import Callable, Iterator

import torch

from megatron.errors import ConfigError
from megatron.logging import run_folder


@contextmanager
def profiler(neox_args) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step. A trace for TensorBoard or chrome://tracing of the steps from
    profile_step_start to profile_step_stop is written to tensorboard_dir, else to the run's folder.

    Raises ConfigError if there is no folder for it.
    """
    if not neox_args.profile:
        yield lambda: None
        return
    folder = neox_args.tensorboard_dir or run_folder(neox_args)
    if folder is None:
        raise ConfigError("profile=true needs a folder for the trace: set tensorboard_dir, log_dir or save")
    start, stop = neox_args.profile_step_start, neox_args.profile_step_stop
    if not 1 <= start < stop:
        raise ConfigError(f"profile_step_start={start} must be at least 1 and below profile_step_stop={stop}")
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=start - 1, warmup=1, active=stop - start, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(folder),
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
    ) as active:
        yield active.step
