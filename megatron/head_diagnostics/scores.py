"""What one layer's heads do with a text: scores, attention weights, and what they add to the residual stream.

Letters: s tokens, n query heads, m key heads, d head_dim, h hidden. Everything is computed in fp32, from one sequence.
"""

from dataclasses import dataclass
from typing import Dict, Optional

import torch

from megatron.head_diagnostics.ranks import effective_rank, product_singular_values, singular_values
from megatron.model.attention.core.masks import hidden_keys


@dataclass(frozen=True)
class LayerSample:
    """The queries, keys and values of one sequence in one layer, after norm and rotation.

    q [s, n, d], k [s, m', d], v [s, m, d]; bias [n, s, s] or None, as added to the scaled scores; turning_pairs: how
    many pairs of the rotated dimensions turn at all, None for all; the rest as in the kernels' `attend`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: Optional[int] = None
    softcap: Optional[float] = None
    bias: Optional[torch.Tensor] = None
    rotary_ndims: int = 0
    turning_pairs: Optional[int] = None


def attention_weights(sample: LayerSample) -> torch.Tensor:
    """Probabilities [n, s, s]."""
    scores = _scores(sample)
    if sample.softcap is not None:
        scores = sample.softcap * torch.tanh(scores / sample.softcap)
    hidden = _hidden(sample)
    return (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)


def score_figures(sample: LayerSample, weights: torch.Tensor, output_weight: torch.Tensor) -> Dict[str, torch.Tensor]:
    """Figures by name, one per query head [n] each; weights are `attention_weights` of the sample, output_weight is the
    layer's output projection [h, n·d].

    score_std, score_max: spread and largest magnitude of the scaled scores that queries see, with bias, before the cap.
    score_rank: effective rank of the matrix of all query-key products, min(s, d) at most; no bias, no mask.
    entropy: of the weights, nats, mean over queries; entropy_share: of the most it could be, log(visible keys).
    attention_rank: effective rank of the matrix of weights. first_token: weight on the first token, mean over the
    other queries that see it. output_norm: length of what the head adds to the residual stream, mean over tokens.
    rotary_share: part of the squared length of queries and keys in dimensions that turn; absent without any.
    """
    figures = {
        **_score_sizes(sample),
        "score_rank": _score_rank(sample),
        **_entropies(sample, weights),
        "attention_rank": effective_rank(singular_values(weights)),
        "first_token": _first_token(sample, weights),
        "output_norm": _output_norm(sample, weights, output_weight),
    }
    if sample.rotary_ndims:
        figures["rotary_share"] = _rotary_share(sample)
    return figures


def similarities(weights: torch.Tensor) -> torch.Tensor:
    """Cosine between the weights of each two heads, [n, s, s] -> [n, n].

    Each head's weights are taken off the mean over heads first: causal patterns are alike before they mean anything.
    """
    flat = (weights - weights.mean(0)).flatten(1)
    flat = flat / flat.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return flat @ flat.mT


def _scores(sample: LayerSample) -> torch.Tensor:
    q = sample.q.float().transpose(0, 1)  # [n, s, d]
    scores = q @ _for_queries(sample.k, q.shape[0]).mT * sample.scale
    return scores if sample.bias is None else scores + sample.bias.float()


def _for_queries(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[s, m, d] -> [n, s, d] in fp32: the key or value head of each query head."""
    return x.float().transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0)


def _hidden(sample: LayerSample) -> Optional[torch.Tensor]:
    tokens = sample.q.shape[0]
    return hidden_keys(tokens, tokens, 0, sample.window, sample.q.device)


def _visible(sample: LayerSample) -> torch.Tensor:
    hidden, tokens = _hidden(sample), sample.q.shape[0]
    return torch.ones(tokens, tokens, dtype=torch.bool, device=sample.q.device) if hidden is None else ~hidden


def _score_sizes(sample: LayerSample) -> Dict[str, torch.Tensor]:
    seen = _scores(sample)[:, _visible(sample)]  # [n, pairs]
    return {"score_std": seen.std(-1, correction=0), "score_max": seen.abs().amax(-1)}


def _score_rank(sample: LayerSample) -> torch.Tensor:
    q = sample.q.float().transpose(0, 1)  # [n, s, d]
    return effective_rank(product_singular_values(q, _for_queries(sample.k, q.shape[0]).mT))


def _entropies(sample: LayerSample, weights: torch.Tensor) -> Dict[str, torch.Tensor]:
    entropy = -torch.xlogy(weights, weights).sum(-1)  # [n, s]
    keys = _visible(sample).sum(-1)
    choosing = keys > 1
    if not choosing.any():
        return {name: torch.zeros_like(entropy[:, 0]) for name in ("entropy", "entropy_share")}
    entropy, most = entropy[:, choosing], keys[choosing].float().log()
    return {"entropy": entropy.mean(-1), "entropy_share": (entropy / most).mean(-1)}


def _first_token(sample: LayerSample, weights: torch.Tensor) -> torch.Tensor:
    seeing = _visible(sample)[:, 0].clone()
    seeing[0] = False
    return weights[:, seeing, 0].mean(-1) if seeing.any() else weights[:, 0, 0]


def _output_norm(sample: LayerSample, weights: torch.Tensor, output_weight: torch.Tensor) -> torch.Tensor:
    heads, width = sample.q.shape[1:]
    context = weights @ _for_queries(sample.v, heads)  # [n, s, d]
    columns = output_weight.float().unflatten(-1, (heads, width)).permute(1, 2, 0)  # [n, d, h]
    return (context @ columns).norm(dim=-1).mean(-1)


def _rotary_share(sample: LayerSample) -> torch.Tensor:
    heads = sample.q.shape[1]
    q, k = sample.q.float().transpose(0, 1), _for_queries(sample.k, heads)
    shares = []
    for x in (q, k):
        pairs = x[..., : sample.rotary_ndims].unflatten(-1, (2, -1))  # dimension i turns with i + r/2
        turning = pairs[..., : sample.turning_pairs].square().sum((1, 2, 3))
        shares.append(turning / x.square().sum((1, 2)).clamp(min=1e-30))
    return (shares[0] + shares[1]) / 2
