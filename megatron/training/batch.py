"""From the token sequences of a data set to what the model and the loss take."""

from typing import Dict, Tuple

import torch

from megatron import mpu

Inputs = Tuple[torch.Tensor, torch.Tensor]
Targets = Tuple[torch.Tensor, torch.Tensor]


def get_batch(neox_args, data: Dict[str, torch.Tensor]) -> Tuple[Inputs, Targets]:
    """({"text": int64 [b, s+1]}, perhaps with "label" [b, s+1]) -> ((tokens, position_ids), (labels, loss_mask)).

    All four are [b, s]: the model reads tokens 0..s-1 and is asked for tokens 1..s. loss_mask (fp32) is 0 where a
    label is negative (-100 in label data) and, with eod_mask_loss, where the model reads an end-of-document token.
    """
    device = mpu.current_device()
    text = data["text"].to(device=device, dtype=torch.int64, non_blocking=True)
    tokens = text[:, :-1].contiguous()  # [b, s]
    labels = text if data.get("label") is None else data["label"].to(device=device, dtype=torch.int64)
    labels = labels[:, 1:].contiguous()  # [b, s]
    loss_mask = (labels >= 0).float()
    if neox_args.eod_mask_loss:
        loss_mask = loss_mask * (tokens != neox_args.tokenizer.eod)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens).contiguous()
    return (tokens, positions), (labels.clamp(min=0), loss_mask)
