"""Seen, not seen, or not decidable at this size: one rule for all claims."""

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from tools.head_dim.claims.claims import Claim
from tools.head_dim.claims.measures import Measured
from tools.head_dim.sweep.statistics import estimate

SEEN, NOT_SEEN, UNDECIDED = "seen", "not seen", "not decidable at this size"
LEAST_SEEDS = 3
"""Two give an interval of which one end is anywhere."""


@dataclass(frozen=True)
class Verdict:
    """mean, interval: of the measured number over seeds, None without enough of them."""

    claim: Claim
    verdict: str
    measured: Measured
    mean: Optional[float]
    interval: Optional[Tuple[float, float]]

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        seeds, quantity = len(self.measured.effects), self.claim.quantity
        quantity = quantity if quantity.startswith("p ") else quantity[0].upper() + quantity[1:]
        if self.interval is None:
            tried = seeds + len(self.measured.left_out)
            return (
                f"{self.verdict.capitalize()}. {quantity}: {seeds} of {tried} seeds have it, {LEAST_SEEDS} are needed."
            )
        low, high = (f"{end:.3g}" for end in self.interval)
        return (
            f"{self.verdict.capitalize()}. {quantity}: {self.mean:.3g} (95 % interval {low} to {high}, {seeds} seeds); "
            f"the claim wants {self.claim.wanted}."
        )

    def to_dict(self) -> Dict[str, Any]:
        """For JSON."""
        return {
            "claim": self.claim.name,
            "says": self.claim.says,
            "verdict": self.verdict,
            "mean": self.mean,
            "interval": self.interval,
            "wanted": [end if math.isfinite(end) else None for end in self.claim.wanted],
            "effects": {str(seed): value for seed, value in self.measured.effects.items()},
            "left_out": {str(seed): reason for seed, reason in self.measured.left_out.items()},
            "sentence": self.sentence,
        }


def judge(claim: Claim, study: Dict[str, Any]) -> Verdict:
    """From a study's figures (see `figures`)."""
    measured = claim.measure(study)
    if len(measured.effects) < LEAST_SEEDS:
        return Verdict(claim, UNDECIDED, measured, None, None)
    found = estimate(list(measured.effects.values()))
    low, high = found.interval
    if claim.wanted.low <= low and high <= claim.wanted.high:
        verdict = SEEN
    elif high < claim.wanted.low or claim.wanted.high < low:
        verdict = NOT_SEEN
    else:
        verdict = UNDECIDED
    return Verdict(claim, verdict, measured, found.mean, found.interval)


def judge_all(figures: Dict[str, Dict[str, Any]], claims: Tuple[Claim, ...]) -> List[Verdict]:
    """Of the claims whose study is there; figures: {study: its figures}."""
    return [judge(claim, figures[claim.study]) for claim in claims if claim.study in figures]
