"""The tokenizer."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsTokenizer:
    """The kind of tokenizer and the vocabulary size that follows from it."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
    ] = "GPT2BPETokenizer"
    """Kind of tokenizer, in any letter case. GPT2BPETokenizer reads `vocab_file` and `merge_file`; HFTokenizer a
    tokenizers JSON; HFGPT2Tokenizer a Hugging Face name or folder (gpt2 if none); SPMTokenizer a sentencepiece model;
    TiktokenTokenizer an encoding's name in `vocab_file`; CharLevelTokenizer needs no file (UTF-8 bytes)."""

    eod_token: Optional[str] = None
    """Text of the token that ends a document and stops generation, for models whose end token is another than the
    tokenizer's usual one, as chat models have it. Null: that one, such as <|endoftext|>."""

    padded_vocab_size: Optional[int] = None
    """Rows of the embedding and the head: the tokenizer's size rounded up to a multiple of make_vocab_size_divisible_by
    x model_parallel_size. Set when the tokenizer is built; give it only where no tokenizer is."""
