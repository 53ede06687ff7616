"""transformers' Qwen3 as workers, as users run it: weights in the dtype of the run, torch's fused AdamW on them."""

from typing import Any, Callable, Dict

import torch

from tools.bench.shapes import hf_config


def causal_lm(settings: Dict[str, Any]) -> torch.nn.Module:
    """A random Qwen3ForCausalLM of the shape and precision of `settings`, which are in our keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if settings["precision"] == "bfloat16" else torch.float32
    return Qwen3ForCausalLM(Qwen3Config(**hf_config(settings))).to(dtype)


def batch(settings: Dict[str, Any]) -> torch.Tensor:
    """Random tokens [b, s]."""
    shape = (settings["train_micro_batch_size_per_gpu"], settings["seq_length"])
    return torch.randint(0, settings["padded_vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def forward_backward(settings: Dict[str, Any]) -> Callable[[], Dict[str, float]]:
    """A worker: forward and backward, gradients dropped."""
    model, tokens = causal_lm(settings).train(), batch(settings)

    def step() -> Dict[str, float]:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return {"loss": loss.item()}

    return step


def training(settings: Dict[str, Any]) -> Callable[[], Dict[str, float]]:
    """A worker: a whole step, forward, backward and fused AdamW on the parameters in their own dtype."""
    model, tokens = causal_lm(settings).train(), batch(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["optimizer"]["params"]["lr"], fused=True)

    def step() -> Dict[str, float]:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item()}

    return step
