"""The figures of all heads of a model, put together from the ranks that hold them."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from megatron import mpu
from megatron.geometry import HeadGeometry
from megatron.head_diagnostics.circuits import circuit_figures, circuit_spectra
from megatron.head_diagnostics.gradients import gradient_figures
from megatron.head_diagnostics.ranks import singular_values
from megatron.head_diagnostics.scores import LayerSample, attention_weights, score_figures, similarities
from megatron.head_diagnostics.weights import HeadMatrices, head_gradients, head_weights
from megatron.model.attention import ParallelSelfAttention

ALIKE = 0.5
"""Pairs of heads of which the weights are more alike than this are kept in the report."""


@dataclass
class LayerReport:
    """One layer. figures: name -> one number per query head. alike: (head, head, cosine of their attention weights).
    spectra: name -> singular values of each head, largest first: attention, qk, ov; empty unless asked for.

    Where heads are in groups of several widths, they are numbered through, and head_dim is a list with that of each.
    """

    layer: int
    head_dim: Union[int, List[int]]
    figures: Dict[str, List[float]]
    alike: List[Tuple[int, int, float]] = field(default_factory=list)
    spectra: Dict[str, List[List[float]]] = field(default_factory=dict)

    def width_of(self, head: int) -> int:
        """Its head_dim."""
        return self.head_dim[head] if isinstance(self.head_dim, list) else self.head_dim


@dataclass
class HeadReport:
    """All layers, in order. tokens: how many of one sequence the scores are of; iteration: of the training run."""

    iteration: Optional[int]
    tokens: int
    layers: List[LayerReport]

    def to_dict(self) -> Dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def matrix(self, name: str) -> List[List[float]]:
        """A figure as [layers][heads]; layers without it are left out."""
        return [layer.figures[name] for layer in self.layers if name in layer.figures]

    def names(self) -> List[str]:
        """Of all figures, in the order of the first layer that has them."""
        return list(dict.fromkeys(name for layer in self.layers for name in layer.figures))


def plain(value: Any) -> Any:
    """For JSON, which has no NaN and no infinity: those become None."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@torch.no_grad()
def layer_report(
    attention: ParallelSelfAttention, samples: Optional[List[LayerSample]], gradients: bool, spectra: bool
) -> Optional[LayerReport]:
    """The report of one layer on all ranks of its model-parallel group; all of them call it. None without samples, one
    for each group of heads, which replicas other than the first do not need."""
    gradients_of = head_gradients(attention) if gradients else [None] * len(attention.head_groups)
    weights = head_weights(attention)
    if samples is None:
        return None
    groups = attention.geometry.groups
    parts = [_group_report(*part, spectra) for part in zip(groups, weights, gradients_of, samples, strict=True)]
    figures, found, probabilities = zip(*parts, strict=True)
    widths = [group.head_dim for group in groups for _ in range(group.num_attention_heads)]
    return LayerReport(
        layer=attention.layer_number,
        head_dim=widths if len(groups) > 1 else groups[0].head_dim,
        figures=_numbered_through(figures),
        alike=_alike(torch.cat([_over_ranks(each) for each in probabilities])),
        spectra=_numbered_through(found) if spectra else {},
    )


def _group_report(
    group: HeadGeometry, weights: HeadMatrices, gradients: Optional[HeadMatrices], sample: LayerSample, spectra: bool
) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor], torch.Tensor]:
    """Figures, spectra and attention weights of the heads of one group, this rank's."""
    figures = {} if gradients is None else gradient_figures(*gradients, group.queries_per_kv)
    probabilities = attention_weights(sample)
    figures.update(score_figures(sample, probabilities, weights[-1]))
    found = circuit_spectra(*weights)
    figures.update(circuit_figures(found))
    if spectra:
        found["attention"] = singular_values(probabilities)
    return figures, found, probabilities


def _numbered_through(groups: Sequence[Dict[str, torch.Tensor]]) -> Dict[str, List[Any]]:
    """By name, an entry for each head of all ranks: those of the first group, then those of the next."""
    return {name: [each for group in groups for each in _over_ranks(group[name]).tolist()] for name in groups[0]}


def _over_ranks(values: torch.Tensor) -> torch.Tensor:
    """[n of this rank, ...] -> [n of all model-parallel ranks, ...] on the CPU."""
    values = values.float().contiguous()
    ranks = mpu.get_model_parallel_world_size()
    if ranks == 1:
        return values.cpu()
    pieces = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(pieces, values, group=mpu.get_model_parallel_group())
    return torch.cat(pieces).cpu()


def _alike(probabilities: torch.Tensor) -> List[Tuple[int, int, float]]:
    cosines = similarities(probabilities)
    first, second = torch.triu_indices(*cosines.shape, offset=1)
    values = cosines[first, second]
    kept = values > ALIKE
    return list(zip(first[kept].tolist(), second[kept].tolist(), values[kept].tolist(), strict=True))


def whole_report(layers: List[LayerReport], iteration: Optional[int], tokens: int) -> HeadReport:
    """Of the layers of all pipeline stages; complete on every rank of the pipeline that calls it."""
    if mpu.get_pipe_parallel_world_size() > 1:
        stages: List[List[LayerReport]] = [[] for _ in range(mpu.get_pipe_parallel_world_size())]
        dist.all_gather_object(stages, layers, group=mpu.get_pipe_parallel_group())
        layers = [layer for stage in stages for layer in stage]
    return HeadReport(iteration, tokens, sorted(layers, key=lambda layer: layer.layer))
