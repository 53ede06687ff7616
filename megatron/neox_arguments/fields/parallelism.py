"""How the model is split over processes."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class NeoXArgsParallelism:
    """Pipeline, tensor and sequence parallelism."""

    pipe_parallel_size: int = 0
    """Number of pipeline stages. 0: no pipeline, the model is one sequence of layers; 1: DeepSpeed's pipeline engine
    with one stage, which saves a file per layer."""

    model_parallel_size: int = 1
    """Number of tensor-parallel ranks that share each layer. Query heads, key/value heads, MLP width and padded
    vocabulary must divide by it."""

    pipe_partition_method: str = "type:transformer|mlp"
    """How layers are dealt out to pipeline stages: `type:regex` balances layers whose class name matches, `parameters`
    balances parameter counts, `uniform` layer counts."""

    world_size: Optional[int] = None
    """Number of processes, from the environment at start."""

    is_pipe_parallel: bool = False
    """True when pipe_parallel_size is at least 1."""

    sequence_parallel: bool = False
    """Split the activations between tensor-parallel blocks (norms, dropout, residual) over the tensor-parallel ranks
    along the sequence. Less memory, the same function; `seq_length` must divide by `model_parallel_size`."""
