"""Head diagnostics of a model that is running: record a forward pass, look at the gradients, put it together."""

from typing import Dict, List, Optional

from torch import nn

from megatron import mpu
from megatron.head_diagnostics.probes import Probes
from megatron.head_diagnostics.report import HeadReport, LayerReport, layer_report, whole_report
from megatron.head_diagnostics.scores import LayerSample

TOKENS = 256
"""Of one sequence, whose scores are looked at: the matrices are as large as its square."""


class HeadDiagnostics:
    """`begin()` before a step, `measure()` between its backward pass and the update, then `report()`; on every rank.

    It costs the step a pass over one sequence's scores and two decompositions per head.
    """

    def __init__(self, model: nn.Module, tokens: int = TOKENS, spectra: bool = False):
        """Raises ConfigError for Transformer Engine's attention."""
        self._probes = Probes(model, tokens)
        self._spectra = spectra
        self._layers: List[LayerReport] = []
        self._tokens = 0

    def begin(self) -> None:
        """The next forward pass is the one to look at."""
        self._layers = []
        self._probes.arm()

    def measure(self, gradients: bool = True) -> None:
        """Compute this stage's figures from what was recorded. gradients False: there was no backward pass."""
        samples: Dict[int, List[LayerSample]] = self._probes.take()
        for number, attention in sorted(self._probes.attentions.items()):
            groups = samples.get(number)
            if groups is not None:
                self._tokens = groups[0].q.shape[0]
            # Replicas of the model saw other texts; the first speaks for all.
            first = mpu.get_data_parallel_rank() == 0
            layer = layer_report(attention, groups if first else None, gradients, self._spectra)
            if layer is not None:
                self._layers.append(layer)

    def report(self, iteration: Optional[int] = None) -> HeadReport:
        """What was measured, of all pipeline stages; complete on the ranks of the first replica."""
        return whole_report(self._layers, iteration, self._tokens)

    def close(self) -> None:
        """Leave the model as it was."""
        self._probes.remove()
