"""What each attention backend does with a model's head_dim: asked of the kernels themselves, nothing is built."""

from dataclasses import dataclass, replace
from typing import Dict, List

import torch

from megatron.errors import ConfigError
from megatron.model.attention.core import KERNELS, AttentionRequest
from megatron.model.attention.core.flash import HEAD_DIM_MULTIPLE
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.equal_widths import by_layer_text, head_dims, one_or_each
from megatron.neox_arguments.widths import named_layers

PRECISIONS = {"fp32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda")
TE = "te_mha"


@dataclass(frozen=True)
class Verdict:
    """Whether a backend runs every layer of a model. note: why not, or what it does to the width."""

    backend: str
    device: str
    precision: str
    runs: bool
    note: str = ""


def verdicts(args: NeoXArgs) -> List[Verdict]:
    """Every kernel of attention_config on each device and precision, as installed here, and Transformer Engine.

    The flash kernel on "cuda" is the flash-attn package's where it is installed, else torch's own.
    """
    rows = [
        _kernel(args, name, device, precision) for name in KERNELS for device in DEVICES for precision in PRECISIONS
    ]
    return [*rows, _transformer_engine(args)]


def _kernel(args: NeoXArgs, name: str, device: str, precision: str) -> Verdict:
    reasons: Dict[str, List[int]] = {}
    for number in range(args.num_layers):
        partition = args.head_geometry(number).shard(args.model_parallel_size)
        for group in partition.groups:
            layer = AttentionRequest.of_layer(args, number, group, torch.device(device))
            reason = KERNELS[name].refusal(replace(layer, dtype=PRECISIONS[precision]))
            if reason is not None and number not in reasons.setdefault(reason, []):
                reasons[reason].append(number)
    notes = reasons or (_padding(args) if name == "flash" else {})
    return Verdict(name, device, precision, not reasons, "; ".join(named_layers(notes, args.num_layers)))


def _padding(args: NeoXArgs) -> Dict[str, List[int]]:
    """What the flash kernel does to widths that it does not take as they are, with the layers."""
    notes: Dict[str, List[int]] = {}
    for geometry, numbers in args.layers_by_geometry().items():
        widths = [group.head_dim for group in geometry.groups]
        padded = {width: -(-width // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE for width in widths}
        texts = [
            f"computed at {wide}, with {wide - width} columns of zeros"
            for width, wide in padded.items()
            if wide > width
        ]
        if texts:
            notes.setdefault(", and ".join(texts), []).extend(numbers)
    return notes


def _transformer_engine(args: NeoXArgs) -> Verdict:
    try:
        args.update(te_mha=True, attention_config=None)
    except ConfigError as error:
        return Verdict(TE, "cuda", "bfloat16", False, "; ".join(error.problems))
    widths = by_layer_text(one_or_each(args, head_dims))
    return Verdict(TE, "cuda", "bfloat16", True, f"kv_channels={widths}; which kernel is Transformer Engine's choice")
