"""What the chunked kernel computes, and in which blocks."""

from dataclasses import dataclass
from typing import Iterator, List, Optional, Tuple

import torch

from megatron.model.attention.core.masks import hidden_keys, visible_keys

Range = Tuple[int, int]
"""First and end."""


@dataclass(frozen=True)
class Spec:
    """The arguments of `attend` that are not tensors; seed: of the dropout masks, if there are any."""

    scale: float
    offset: int
    window: Optional[int] = None
    softcap: Optional[float] = None
    dropout_p: float = 0.0
    seed: int = 0

    def is_plain(self, key_tokens: int) -> bool:
        """Causal, with neither cached keys nor a window that hides any."""
        unhidden = self.window is None or self.window >= key_tokens - 1
        return self.offset == 0 and unhidden

    def query_blocks(self, query_tokens: int, size: int) -> Iterator[Range]:
        """All queries."""
        for first in range(0, query_tokens, size):
            yield first, min(first + size, query_tokens)

    def visible(self, rows: Range, key_tokens: int) -> Range:
        """The keys that any of the queries sees."""
        return visible_keys(rows[1] - rows[0], key_tokens, rows[0] + self.offset, self.window)

    def key_blocks(self, rows: Range, key_tokens: int, size: int) -> List[Range]:
        """Those keys in blocks."""
        first, end = self.visible(rows, key_tokens)
        return [(start, min(start + size, end)) for start in range(first, end, size)]

    def hide_(self, scores: torch.Tensor, rows: Range, columns: Range, value: float) -> None:
        """Write `value` into scores [..., rows, columns] where a query may not see a key."""
        if self.window is None:  # all see the keys before the first query's own
            seen = max(0, min(rows[0] + self.offset + 1, columns[1]) - columns[0])
            scores, columns = scores[..., seen:], (columns[0] + seen, columns[1])
        hidden = self.hidden(rows, columns, scores.device) if columns[0] < columns[1] else None
        if hidden is not None:
            scores.masked_fill_(hidden, value)

    def hidden(self, rows: Range, columns: Range, device: torch.device) -> Optional[torch.Tensor]:
        """Boolean [rows, columns], True where a query may not see a key; None where all see all."""
        shift = rows[0] + self.offset - columns[0]
        return hidden_keys(rows[1] - rows[0], columns[1] - columns[0], shift, self.window, device)
