"""Which keys a query may see: causal, optionally within a sliding window. The only statement of that rule."""

from typing import Optional, Tuple

import torch


def hidden_keys(
    query_tokens: int, key_tokens: int, causal_offset: int, window: Optional[int], device: torch.device
) -> Optional[torch.Tensor]:
    """Boolean [s, t], True where query i may not see key j; None when every query sees every key.

    Query i stands at position i + causal_offset. It sees itself, everything before it, and, with a window, at
    most `window` tokens before it: GPT-NeoX's `sliding_window_width` counts the tokens beside the query itself.
    """
    last_position = causal_offset + query_tokens - 1
    if causal_offset >= key_tokens - 1 and (window is None or last_position <= window):
        return None
    query_positions = torch.arange(causal_offset, causal_offset + query_tokens, device=device).unsqueeze(1)  # [s, 1]
    distance = query_positions - torch.arange(key_tokens, device=device)  # [s, t]
    hidden = distance < 0
    if window is not None:
        hidden |= distance > window
    return hidden


def first_visible_key(causal_offset: int, window: Optional[int]) -> int:
    """Index of the first key that any of the queries can see; everything before it can be sliced away."""
    return 0 if window is None else max(0, causal_offset - window)


def visible_keys(query_tokens: int, key_tokens: int, causal_offset: int, window: Optional[int]) -> Tuple[int, int]:
    """First and end of the keys that any of the queries can see."""
    return first_visible_key(causal_offset, window), min(key_tokens, causal_offset + query_tokens)
