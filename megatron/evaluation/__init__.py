"""Evaluation of a trained model: tasks of lm-evaluation-harness, and the perplexity of a text without it."""

from megatron.evaluation.completion import Completion, complete
from megatron.evaluation.perplexity import text_perplexity
from megatron.evaluation.scoring import score

__all__ = ["Completion", "complete", "score", "text_perplexity"]
