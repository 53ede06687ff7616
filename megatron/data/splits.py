"""How documents and samples are shared out: the split string, the weights of a blend, the sizes of evaluation."""

import math
from typing import List, Optional, Sequence, Tuple

from megatron.errors import ConfigError


def get_train_valid_test_split_(split: str, size: int) -> List[int]:
    """[0, a, b, size]: train documents are [0, a), valid [a, b), test [b, size).

    `split` is up to three numbers with commas or slashes between them, in any unit: "969, 30, 1". Each part is
    rounded to whole documents and the remainder is taken out of the first.
    Raises ConfigError if it is not that.
    """
    try:
        parts = [float(part) for part in str(split).replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(math.isfinite(part) and part >= 0 for part in parts) or sum(parts) == 0:
        raise ConfigError(f"split={split!r} must be up to three numbers, not all zero, such as '969, 30, 1'")
    parts += [0.0] * (3 - len(parts))
    bounds, total = [0], sum(parts)
    for part in parts:
        bounds.append(bounds[-1] + int(round(part / total * float(size))))
    surplus = bounds[-1] - size
    return [0] + [max(0, bound - surplus) for bound in bounds[1:]]


def get_normalized_weights_and_num_samples(
    weights: Sequence[float], num_samples: Optional[int]
) -> Tuple[List[float], List[Optional[int]]]:
    """Weights that sum to 1, and the samples each data set must provide for num_samples of the blend.

    Half a percent more than its share, because a blend follows the weights only approximately.
    Raises ConfigError for weights that are no proportions.
    """
    if any(weight < 0 or not math.isfinite(weight) for weight in weights) or sum(weights) <= 0:
        raise ConfigError(f"data weights {list(weights)} must be zero or positive, and not all zero")
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if num_samples is None:
        return shares, [None] * len(shares)
    return shares, [max(1, math.ceil(num_samples * share * 1.005)) for share in shares]


def weights_by_num_docs(documents: Sequence[int], alpha: float) -> List[float]:
    """Weights of data sets with these numbers of documents (weight_by_num_documents, weighted_sampler_alpha).

    p = n / sum(n); weight = p ** alpha, normalised, times (1 - p), normalised. The p ** alpha is Conneau et al. 2020
    (arXiv 1911.02116); the factor 1 - p is GPT-NeoX's own and kept for equal data order.
    """
    if len(documents) == 1:
        return [1.0]
    shares = [number / sum(documents) for number in documents]
    powers = [share**alpha for share in shares]
    weights = [power / sum(powers) * (1 - share) for power, share in zip(powers, shares, strict=True)]
    return [weight / sum(weights) for weight in weights]


def num_evaluation_iterations(train_iters: int, eval_interval: int, eval_iters: int) -> int:
    """Evaluation steps of a whole run, the one after training included."""
    return (train_iters // eval_interval + 1) * eval_iters
