"""Our training as workers: the engine and the loop's own step, as `pretrain` runs them."""

import os
from typing import Any, Callable, Dict, Tuple

import torch
import torch.distributed as dist

from tools.bench.workers import memory


def training(settings: Dict[str, Any]) -> Callable[[], Dict[str, float]]:
    """A worker: `train_step` of the engine that `setup_model_and_optimizer` builds from these arguments. Also says
    what was resident before there was a model."""
    from megatron.training import setup_model_and_optimizer, train_step

    args = _arguments(settings)
    start = memory("VmRSS")
    engine = setup_model_and_optimizer(args)
    engine.train()
    data = {"text": _text(args)}

    def step() -> Dict[str, float]:
        loss = train_step(args, engine, iter([data] * args.gradient_accumulation_steps))["loss"]
        return {"loss": loss, "rss_at_start": start}

    return step


def forward_backward(settings: Dict[str, Any]) -> Callable[[], Dict[str, float]]:
    """A worker: forward and backward of the model without DeepSpeed, gradients dropped."""
    model, loss_of = _model(settings)

    def step() -> Dict[str, float]:
        loss = loss_of()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return {"loss": loss.item()}

    return step


def without_engine(settings: Dict[str, Any]) -> Callable[[], Dict[str, float]]:
    """A worker: a step of the same model by hand, with no DeepSpeed and no loop: forward, backward, the gradient's norm
    and clipping, torch's fused AdamW on fp32 weights, which are copied into the model's where those are narrower."""
    model, loss_of = _model(settings)
    parameters = list(model.parameters())
    narrow = parameters[0].dtype != torch.float32
    masters = [p.detach().float().requires_grad_() for p in parameters] if narrow else parameters
    rate, decay = settings["optimizer"]["params"]["lr"], settings.get("weight_decay", 0.01)
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=decay, fused=True)

    def step() -> Dict[str, float]:
        loss = loss_of()
        loss.backward()
        if narrow:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if narrow:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        return {"loss": loss.item()}

    return step


def _model(settings: Dict[str, Any]) -> Tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model without DeepSpeed, and a function that computes its loss on one batch."""
    from megatron.model.gpt2_model import build_model
    from megatron.training.batch import get_batch

    args = _arguments({**settings, "pipe_parallel_size": 0})
    model = build_model(args).train()
    inputs, targets = get_batch(args, {"text": _text(args)})
    return model, lambda: model(inputs, targets)


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
