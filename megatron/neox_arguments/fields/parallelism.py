"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class NeoXArgsParallelism:
    """TODO: what these arguments are for."""

    pipe_parallel_size: int = 0
    """TODO."""

    model_parallel_size: int = 1
    """TODO."""

    pipe_partition_method: str = "type:transformer|mlp"
    """TODO."""

    world_size: Optional[int] = None
    """TODO."""

    is_pipe_parallel: bool = False
    """TODO."""

    sequence_parallel: bool = False
    """TODO."""
