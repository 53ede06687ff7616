"""The bytes of a text's UTF-8 form as tokens."""

from typing import Dict, List, Sequence

from megatron.tokenizer.tokenizer import AbstractTokenizer


class CharLevelTokenizer(AbstractTokenizer):
    """512 tokens: numbers below 256 are bytes, 0 is the end of a document and 1 padding; the rest is unused."""

    source = "tokenizer_type=CharLevelTokenizer"
    vocab_size = 512
    _eod = 0
    pad = 1

    @classmethod
    def from_args(cls, args) -> "CharLevelTokenizer":
        """No file is needed."""
        return cls()

    @property
    def vocab(self) -> Dict[str, int]:
        """By the character of the byte in Latin-1, because single bytes are no UTF-8 text."""
        return {chr(byte): byte for byte in range(256)}

    def tokenize(self, text: str) -> List[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        kept = bytes(int(token) for token in token_ids if self.pad < token < 256)
        return kept.decode("utf-8", errors="replace")
