"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): W x + alpha / rank * B A dropout(x), of which only A and
B are trained.

An adapter lives in the linear layer that it adapts, as `lora.A` and `lora.B`. The rows of a fused weight are parts of
their own (q, k and v; up and gate), each with its A, as if they were apart: so adapters are those that Hugging Face's
PEFT has for q_proj, k_proj and v_proj. A starts as PEFT's does, B at 0, so that at first nothing changes.

Letters: r rank, g number of parts, o and i the rows and columns of the weight, p tensor-parallel ranks.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron import mpu
from megatron.geometry import HeadGeometry, MLPGeometry
from megatron.mixed_geometry import AnyHeadGeometry
from megatron.model.attention.qkv import pack_qkv
from megatron.model.word_embeddings import Embedding
from megatron.neox_arguments.lora import LoRASettings, lora_settings


class _Adapter(nn.Module):
    """What both kinds share: the settings, and dropout. own_features: ranks hold different inputs."""

    def __init__(self, settings: LoRASettings, own_features: bool):
        super().__init__()
        self.scale = settings.scale
        self.dropout = settings.dropout
        self._own_features = own_features and mpu.get_model_parallel_world_size() > 1

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        if not self._own_features:
            return F.dropout(x, self.dropout)
        with mpu.get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)


class ColumnAdapter(_Adapter):
    """For a ColumnParallelLinear: A [g·r, i] on every rank, B [o/p, r] split as the weight's rows are.

    parts: int64 [o], the part (0 to g - 1) that each row of the whole weight belongs to. All parts see x with the same
    elements dropped.
    """

    def __init__(self, neox_args, linear: mpu.ColumnParallelLinear, parts: torch.Tensor, settings: LoRASettings):
        super().__init__(settings, own_features=linear.sequence_parallel)
        self.sequence_parallel, self.seq_dim = linear.sequence_parallel, linear.seq_dim
        groups = linear.weight.partition_groups
        self.num_parts = int(parts.max()) + 1
        shape = (self.num_parts * settings.rank, linear.input_size)
        self.A = mpu.create_parameter(neox_args, shape, _uniform)
        self.B = mpu.create_parameter(neox_args, (linear.output_size, settings.rank), _zero, 0, groups)
        own = mpu.shard(parts, 0, mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size(), groups)
        self.register_buffer("part_of_row", F.one_hot(own, self.num_parts).to(self.B), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as the linear layer's input [..., i] -> what to add to its output [..., o/p]."""
        weight = mpu.copy_weight_to_sequence_parallel_region(self.A) if self.sequence_parallel else self.A
        low = F.linear(self._dropped(x), weight) * self.scale  # [..., g·r]
        if self.sequence_parallel:
            low = mpu.gather_from_sequence_parallel_region(low, self.seq_dim)
        else:
            low = mpu.copy_to_model_parallel_region(low)
        return F.linear(low, spread(self.B, self.part_of_row))


class RowAdapter(_Adapter):
    """For a RowParallelLinear: A [r, i/p] split as the weight's columns are, B [o, r] on every rank."""

    def __init__(self, neox_args, linear: mpu.RowParallelLinear, settings: LoRASettings):
        super().__init__(settings, own_features=True)
        shape, groups = (settings.rank, linear.input_size), linear.weight.partition_groups
        self.A = mpu.create_parameter(neox_args, shape, _uniform, 1, groups)
        self.B = mpu.create_parameter(neox_args, (linear.output_size, settings.rank), _zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., i/p] -> this rank's term of what to add, [..., o]; the linear layer's own sum completes it."""
        low = F.linear(self._dropped(x), self.A) * self.scale  # [..., r]
        # A term on each rank: the gradients of the copies of B are terms of a sum, too.
        return F.linear(low, mpu.copy_weight_to_sequence_parallel_region(self.B))


def spread(B: torch.Tensor, part_of_row: torch.Tensor) -> torch.Tensor:
    """[o, r] and one-hot [o, g] -> [o, g·r]: each row where the A of its part is, so that one product serves all parts
    whatever their order in the weight."""
    return (B.unsqueeze(1) * part_of_row.unsqueeze(-1)).flatten(1)


def qkv_parts(geometry: AnyHeadGeometry) -> torch.Tensor:
    """0 for rows of queries, 1 of keys, 2 of values, in the order of the fused weight: int64 [(n + 2m)·d]."""
    return torch.cat([_parts_of_heads(group) for group in geometry.groups])


def _parts_of_heads(group: HeadGeometry) -> torch.Tensor:
    heads = [group.num_attention_heads] + [group.num_kv_heads] * group.kv_parts
    q, *kv = (torch.full((number, group.head_dim), part) for part, number in enumerate(heads))
    return pack_qkv(q, kv[0], kv[-1], group.qkv_layout)


def mlp_parts(geometry: MLPGeometry) -> torch.Tensor:
    """0 for rows of the up branch, 1 of the gate: int64 [f or 2f]."""
    return torch.arange(2 if geometry.gated else 1).repeat_interleave(geometry.ffn_hidden_size)


def row_parts(neox_args, target: str, layer_number: int) -> Optional[torch.Tensor]:
    """The part of each row of a target's whole weight; None where columns are split over the ranks."""
    if target == "query_key_value":
        return qkv_parts(neox_args.head_geometry(layer_number))
    return mlp_parts(neox_args.mlp_geometry(layer_number)) if target == "linear1" else None


def add_adapters(layer: nn.Module, neox_args) -> None:
    """Give a transformer layer's linear layers the adapters that the config asks for, behind all other parameters: the
    initial values of those do not depend on `lora` then."""
    settings = lora_settings(neox_args)
    for target in settings.targets if settings else ():
        linear = getattr(layer.attention if target in ("query_key_value", "dense") else layer.mlp, target)
        parts = row_parts(neox_args, target, layer.layer_number)
        if parts is None:
            linear.lora = RowAdapter(neox_args, linear, settings)
        else:
            linear.lora = ColumnAdapter(neox_args, linear, parts, settings)


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's, by its name in a layer or a model."""
    return name.rpartition(".")[0].endswith(".lora")


def freeze_base(model: nn.Module, neox_args) -> None:
    """With `lora`, leave nothing to train but the adapters.

    Layers whose activations are computed again get gradients only if what goes in has one, so the output of the frozen
    embedding is given one.
    """
    if neox_args.lora is None:
        return
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for module in model.modules() if neox_args.checkpoint_activations else ():
        if isinstance(module, Embedding):
            module.register_forward_hook(_with_gradient)


def _with_gradient(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_(torch.is_grad_enabled())


def _uniform(tensor: torch.Tensor, generator: Optional[torch.Generator] = None) -> None:
    """Between -1 and 1 over sqrt(i): what nn.Linear starts with, and PEFT's A."""
    bound = tensor.shape[1] ** -0.5
    tensor.uniform_(-bound, bound, generator=generator)


def _zero(tensor: torch.Tensor, generator: Optional[torch.Generator] = None) -> None:
    tensor.zero_()


def merged(
    weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float, parts: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The weight [o, i] with its adapter in it, of the whole layer or of one rank; computed in fp32 and rounded once.

    parts: of the rows of `weight`, as row_parts gives them; None for one part.
    """
    B = B.float() if parts is None else spread(B.float(), F.one_hot(parts))
    return torch.addmm(weight.float(), B, A.float(), alpha=scale).to(weight.dtype)
