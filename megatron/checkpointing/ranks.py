"""What checkpointing needs from torch.distributed; every function also works without a process group."""

from contextlib import contextmanager
from typing import Any, Iterator, List

import torch.distributed as dist

from megatron.errors import CheckpointError, NeoXError


def rank() -> int:
    """Global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def say(message: str) -> None:
    """Print on rank 0 only."""
    if rank() == 0:
        print(message, flush=True)


@contextmanager
def together() -> Iterator[None]:
    """If any rank meets an error inside, every rank raises it, instead of some of them waiting for the others.

    Raises CheckpointError with each different message once. A failing disk (OSError) counts as one.
    """
    error = None
    try:
        yield
    except (NeoXError, OSError) as caught:
        error = caught
    messages = [message for message in _gather(None if error is None else str(error)) if message is not None]
    if messages:
        raise CheckpointError("\n".join(dict.fromkeys(messages))) from error


def _gather(value: Any) -> List[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
