"""Recording what the attention kernels are given, without changing what they compute."""

from typing import Dict, List, Optional

import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.head_diagnostics.scores import LayerSample
from megatron.model.attention import ParallelSelfAttention
from megatron.model.attention.heads import HeadGroup
from megatron.neox_arguments.layer_attention import RotarySettings


class Probes:
    """Stands in the attention layers of a model (this rank's stage) and keeps the first sequence of a forward pass.

    Nothing is kept before `arm()`; then each layer keeps the first `tokens` tokens of the first sequence that it is
    given, once: later micro batches and recomputed activations are not looked at. `take()` hands them over.

    Raises ConfigError for attention of Transformer Engine, which does not show its queries.
    """

    def __init__(self, model: nn.Module, tokens: int):
        self.attentions = attention_layers(model)
        self._kernels = {
            number: [_Recording(group, tokens) for group in layer.head_groups]
            for number, layer in self.attentions.items()
        }

    def arm(self) -> None:
        """Keep what comes next."""
        for kernel in self._all():
            kernel.sample, kernel.armed = None, True

    def take(self) -> Dict[int, List[LayerSample]]:
        """By layer number (0-based), what was kept since `arm` of each group of its heads; only once."""
        samples = {number: [kernel.sample for kernel in kernels] for number, kernels in self._kernels.items()}
        for kernel in self._all():
            kernel.sample, kernel.armed = None, False
        return {number: groups for number, groups in samples.items() if None not in groups}

    def remove(self) -> None:
        """Leave the model as it was."""
        for number, layer in self.attentions.items():
            for group, kernel in zip(layer.head_groups, self._kernels[number], strict=True):
                group.kernel = kernel.kernel

    def _all(self) -> List["_Recording"]:
        return [kernel for kernels in self._kernels.values() for kernel in kernels]


def attention_layers(model: nn.Module) -> Dict[int, ParallelSelfAttention]:
    """By layer number (0-based). Raises ConfigError where a layer's attention is Transformer Engine's."""
    layers: List[nn.Module] = [module for module in model.modules() if hasattr(module, "layer_number")]
    found = {layer.layer_number: layer for layer in layers if isinstance(layer, ParallelSelfAttention)}
    missing = {layer.layer_number for layer in layers} - set(found)
    if missing:
        raise ConfigError(
            "te_mha=True: head diagnostics read queries and keys, which Transformer Engine's attention does not show; "
            "look at the same checkpoint with te_mha: false"
        )
    return found


class _Recording:
    """A kernel that keeps its first sequence when armed."""

    def __init__(self, group: HeadGroup, tokens: int):
        self.kernel = group.kernel
        self.armed = False
        self.sample = None
        self._group = group
        self._tokens = tokens
        group.kernel = self

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **function) -> torch.Tensor:
        """As the kernel's; q [s, b, n, d], k [t, b, m', d], v [t, b, m, d]."""
        if self.armed:
            self.armed, self.sample = False, self._sample(q, k, v, **function)
        return self.kernel.attend(q, k, v, **function)

    def _sample(self, q, k, v, *, scale, window=None, softcap=None, bias=None, score_divisor=1.0, **_) -> LayerSample:
        count = min(self._tokens, q.shape[0])
        if bias is not None:
            bias = bias.detach()[:, :count, :count] * score_divisor
        return LayerSample(
            *(x.detach()[:count, 0].clone() for x in (q, k, v)),
            scale=scale,
            window=window,
            softcap=softcap,
            bias=bias,
            rotary_ndims=self._group.rotary_ndims,
            turning_pairs=_turning_pairs(self._group.function.rotary),
        )


def _turning_pairs(rotary: Optional[RotarySettings]) -> Optional[int]:
    """Fewer than there are with a rope_scaling of type proportional."""
    return None if rotary is None or rotary.scaling is None else rotary.scaling.rotated_pairs(rotary.ndims)
