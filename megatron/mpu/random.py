"""Random states and activation checkpointing, both DeepSpeed's, which save and restore each other's state.

Dropout on values that are split over the model-parallel ranks must differ between the ranks, dropout on replicated
values must not. The default generator serves the replicated ones; the tracker's state serves the split ones:

    with mpu.get_cuda_rng_tracker().fork():
        hidden = dropout(hidden)

In spite of their names both work on the CPU. deepspeed is imported in the functions, because it takes seconds.
"""

import contextlib
from typing import Any, Callable


def get_cuda_rng_tracker():
    """The tracker of model-parallel random states: get_states(), set_states(states), fork().

    Before `model_parallel_cuda_manual_seed` was called (one process, no initialisation) fork() changes nothing.
    """
    from deepspeed import checkpointing

    tracker = checkpointing.get_cuda_rng_tracker()
    return tracker if tracker.get_states() else _UnseededTracker(tracker)


class _UnseededTracker:
    """Stands for DeepSpeed's tracker while that has no state to fork."""

    def __init__(self, tracker):
        self.get_states = tracker.get_states
        self.set_states = tracker.set_states

    @contextlib.contextmanager
    def fork(self):
        yield


def model_parallel_cuda_manual_seed(seed: int):
    """Seed the default generator with `seed`, the same on all model-parallel ranks, and the tracker's state with
    seed + 2718 + model-parallel rank. DeepSpeed's activation checkpointing must be configured with mpu before."""
    from deepspeed import checkpointing

    checkpointing.model_parallel_cuda_manual_seed(seed)


def checkpoint(function: Callable, *args: Any) -> Any:
    """Run function(*args) without keeping its activations; they are computed again in the backward pass, with the
    same random states. Partitioned, contiguous or on the CPU as configured at initialisation."""
    from deepspeed import checkpointing

    return checkpointing.checkpoint(function, *args)
