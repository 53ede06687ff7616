"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsTokenizer:
    """TODO: what these arguments are for."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
    ] = "GPT2BPETokenizer"
    """TODO."""

    padded_vocab_size: Optional[int] = None
    """TODO."""
