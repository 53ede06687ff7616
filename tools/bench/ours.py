"""Our training as workers: the engine and the loop's own step, as `pretrain` runs them."""

import os
from typing import Any, Callable, Dict

import torch
import torch.distributed as dist


def training(settings: Dict[str, Any]) -> Callable[[], Dict[str, float]]:
    """A worker: `train_step` of the engine that `setup_model_and_optimizer` builds from these arguments."""
    from megatron.training import setup_model_and_optimizer, train_step

    args = _arguments(settings)
    engine = setup_model_and_optimizer(args)
    engine.train()
    data = {"text": _text(args)}

    def step() -> Dict[str, float]:
        return {"loss": train_step(args, engine, iter([data] * args.gradient_accumulation_steps))["loss"]}

    return step


def forward_backward(settings: Dict[str, Any]) -> Callable[[], Dict[str, float]]:
    """A worker: forward and backward of the model without DeepSpeed, gradients dropped."""
    from megatron.model.gpt2_model import build_model, cross_entropy
    from megatron.training.batch import get_batch

    args = _arguments({**settings, "pipe_parallel_size": 0})
    model, loss_function = build_model(args).train(), cross_entropy(args)
    inputs, targets = get_batch(args, {"text": _text(args)})

    def step() -> Dict[str, float]:
        loss = loss_function(model(inputs), targets)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return {"loss": loss.item()}

    return step


def _arguments(settings: Dict[str, Any]):
    """NeoXArgs of a process that is the only rank."""
    from megatron.initialize import initialize_megatron
    from megatron.neox_arguments import NeoXArgs

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    args = NeoXArgs.from_dict(settings)
    initialize_megatron(args)
    return args


def _text(args) -> torch.Tensor:
    """Random tokens [b, s + 1]."""
    shape = (args.train_micro_batch_size_per_gpu, args.seq_length + 1)
    return torch.randint(0, args.padded_vocab_size, shape, generator=torch.Generator().manual_seed(1))
