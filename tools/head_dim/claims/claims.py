"""The claims, and what would count as seeing them."""

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, NamedTuple

from tools.head_dim.claims import measures

SOURCE = "an article on re-examining head dimension; no measurement of it is known here"
BETTER = 0.01
"""Nats per token, 1 % of the perplexity: a smaller gain is nothing to choose a design by."""


class Range(NamedTuple):
    """Both ends belong to it."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g} or more" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Claim:
    """name: of its picture. study: of its YAML file. measure: from the study's figures to a number for each seed.
    quantity: what that number is. wanted: where the claim has it, and why there."""

    name: str
    says: str
    source: str
    study: str
    measure: Callable[[Dict[str, Any]], measures.Measured]
    quantity: str
    wanted: Range
    why: str


CLAIMS = (
    Claim(
        "rank",
        "wider heads give attention matrices of a higher rank",
        f"{SOURCE}. That the scores' rank is at most min(tokens, head_dim) is exact (Bhojanapalli et al. 2020, "
        "arXiv:2002.07028, theorem 1); the attention weights come after a softmax, which can have any rank",
        "claim_widths",
        measures.rank_per_doubling,
        "the factor on the effective rank of the attention matrix for each doubling of head_dim",
        Range(1.1, math.inf),
        "the claim names no number; 2 would be in proportion to head_dim, and under 1.1 the width would not be what "
        "decides about the rank",
    ),
    Claim(
        "gradients",
        "gradient norms are 3 to 5 times as large with wide heads",
        SOURCE,
        "claim_widths",
        measures.gradient_ratio,
        "a head's gradient norm at head_dim 64 over that at 16, which is the quotient",
        Range(3.0, math.inf),
        "the lower number of the claim; four times as many weights with gradients of the same size each would make 2",
    ),
    Claim(
        "learning_rate",
        "the best learning rate goes with the square root of head_dim",
        SOURCE,
        "claim_learning_rate",
        measures.rate_exponent,
        "p in: the best learning rate goes with head_dim ** p (below 0: wider heads want a lower one)",
        Range(0.25, 0.75),
        "the claim is 0.5, and what is further than 0.25 from it would be nearer to another law; read as 1 over the "
        "square root it would be -0.75 to -0.25",
    ),
    Claim(
        "rotary",
        "wide heads do better with the denominator of their rotary exponents stretched (rotary_denominator_scale: 1.5)",
        SOURCE,
        "claim_rotary",
        measures.gain("rotary_denominator_scale 1", "rotary_denominator_scale 1.5"),
        "nats per token by which the validation loss is lower with 1.5 than with 1",
        Range(BETTER, math.inf),
        "the claim names no number; less than 0.01 (1 % of the perplexity) is nothing to choose by",
    ),
    Claim(
        "depth",
        "heads that grow wider with depth do better than heads of one width",
        SOURCE,
        "claim_depth",
        measures.gain("the same in all layers", "growing"),
        "nats per token by which the validation loss is lower with growing widths, at equal parameters",
        Range(BETTER, math.inf),
        "the claim names no number; less than 0.01 (1 % of the perplexity) is nothing to choose by",
    ),
)


def studies() -> Dict[str, list]:
    """{study: its claims}, in order."""
    found: Dict[str, list] = {}
    for claim in CLAIMS:
        found.setdefault(claim.study, []).append(claim)
    return found
