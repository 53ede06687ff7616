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
        """Those keys in blocks, the same in both passes, because dropout goes by them."""
        first, end = self.visible(rows, key_tokens)
        return [(start, min(start + size, end)) for start in range(first, end, size)]

    def hidden(self, rows: Range, columns: Range, device: torch.device) -> Optional[torch.Tensor]:
        """Boolean [rows, columns], True where a query may not see a key; None where all see all."""
        shift = rows[0] + self.offset - columns[0]
        return hidden_keys(rows[1] - rows[0], columns[1] - columns[0], shift, self.window, device)
