"""What attention heads do: figures of their scores, their circuits and their gradients, layer by layer."""

from megatron.head_diagnostics.checklist import Finding, findings
from megatron.head_diagnostics.collect import TOKENS, HeadDiagnostics
from megatron.head_diagnostics.report import HeadReport, LayerReport

__all__ = ["TOKENS", "Finding", "HeadDiagnostics", "HeadReport", "LayerReport", "findings"]
