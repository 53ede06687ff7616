"""Means of few runs with their uncertainty: Student's t, as there are as many runs as seeds."""

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean and the interval around it; None with fewer than two values."""

    mean: float
    interval: Optional[Tuple[float, float]]


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean and t interval: mean +- t(n - 1) * s / sqrt(n), s the sample's standard deviation."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = t_quantile((1 + confidence) / 2, count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, (mean - half, mean + half))


def paired(values: Dict[int, float], baseline: Dict[int, float], confidence: float = CONFIDENCE) -> Optional[Estimate]:
    """The mean difference to the baseline over the seeds that both have, and its t interval.

    Runs of one seed read the same texts in the same order, so that differences vary less than the runs do. None if
    they share no seed.
    """
    shared = sorted(values.keys() & baseline.keys())
    return estimate([values[seed] - baseline[seed] for seed in shared], confidence) if shared else None


def t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t with so many degrees of freedom stays under with this probability (0.5 or more)."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def t_probability(value: float, degrees: int) -> float:
    """P(t < value), from the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(value, math.sqrt(degrees))
    cosine = math.cos(angle) ** 2
    terms: List[float] = []
    if degrees % 2:
        term = math.cos(angle)
        for index in range(1, degrees - 1, 2):
            terms.append(term)
            term *= cosine * (index + 1) / (index + 2)
        inside = 2 / math.pi * (angle + math.sin(angle) * math.fsum(terms))
    else:
        term = 1.0
        for index in range(0, degrees - 1, 2):
            terms.append(term)
            term *= cosine * (index + 1) / (index + 2)
        inside = math.sin(angle) * math.fsum(terms)
    return (1 + inside) / 2
