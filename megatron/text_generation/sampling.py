"""Choosing the next token from a row of logits: greedy, temperature, top-k and top-p."""

import math
from dataclasses import dataclass
from typing import List, Optional

import numpy as np
import torch
import torch.nn.functional as F

from megatron.errors import ConfigError


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is chosen. Greedy if all three are 0, else a random draw.

    temperature divides the logits (0 leaves them as they are); top_k keeps the k most likely tokens (0 keeps all);
    top_p then keeps the smallest set of most likely tokens whose probability exceeds top_p (0 keeps all).
    Raises ConfigError, with every problem, for values outside these meanings.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0

    def __post_init__(self):
        problems = self._problems()
        if problems:
            raise ConfigError(problems)

    @property
    def greedy(self) -> bool:
        """Always the most likely token; nothing is drawn."""
        return self.temperature == 0 and self.top_k == 0 and self.top_p == 0

    def _problems(self) -> List[str]:
        problems = []
        if not _is_number(self.temperature) or self.temperature < 0:
            problems.append(
                f"temperature={self.temperature!r} must be a number from 0; 0 leaves the logits as they are"
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            problems.append(f"top_k={self.top_k!r} must be a whole number from 0; 0 keeps every token")
        if not _is_number(self.top_p) or not 0 <= self.top_p <= 1:
            problems.append(f"top_p={self.top_p!r} must be a number from 0 to 1; 0 keeps every token")
        return problems


def filter_logits(logits: torch.Tensor, top_k: int = 0, top_p: float = 0.0) -> torch.Tensor:
    """logits [b, v] with the tokens outside top_k, and then outside top_p, at minus infinity; the input is kept.

    Tokens that tie with the k-th stay in. The most likely token always stays in. Top-p (nucleus) sampling is from
    Holtzman et al. 2020, section 3.1.
    """
    if top_k > 0:
        kth_largest = logits.topk(min(top_k, logits.size(-1)), dim=-1).values[..., -1:]  # [b, 1]
        logits = logits.masked_fill(logits < kth_largest, -math.inf)
    if 0 < top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        cumulative = ordered.softmax(dim=-1).cumsum(dim=-1)
        before = F.pad(cumulative[..., :-1], (1, 0))  # probability of all tokens more likely than this one
        outside = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, before > top_p)
        logits = logits.masked_fill(outside, -math.inf)
    return logits


def choose_tokens(
    logits: torch.Tensor, settings: SamplingSettings, generator: Optional[torch.Generator] = None
) -> torch.Tensor:
    """The next token of each row of logits [b, v] -> int64 [b]; `generator` lives on the logits' device."""
    if settings.greedy:
        return logits.float().argmax(dim=-1)  # of half precision, torch looks through them one by one
    logits = logits.float()
    if settings.temperature > 0:
        logits = logits / settings.temperature
    probabilities = filter_logits(logits, settings.top_k, settings.top_p).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def seeded_generator(device: torch.device, seed: int, sample: int = 0) -> torch.Generator:
    """The random stream of one prompt's `sample`-th continuation.

    It depends on nothing else, so a prompt gives the same text alone and after other prompts.
    """
    mixed = np.random.SeedSequence((seed % 2**64, sample)).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(mixed) >> 1)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
