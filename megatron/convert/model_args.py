"""The arguments of a model whose settings a family gave."""

from typing import Any, Mapping

from megatron.neox_arguments import NeoXArgs


def arguments_of(settings: Mapping[str, Any]) -> NeoXArgs:
    """The arguments for a family's settings, on as many processes as they ask for. Raises ConfigError."""
    ranks = settings.get("model_parallel_size", 1) * max(settings.get("pipe_parallel_size", 0), 1)
    machine = dict(global_num_gpus=ranks, train_micro_batch_size_per_gpu=1, distributed_backend="gloo")
    return NeoXArgs.from_dict({**settings, **machine})
