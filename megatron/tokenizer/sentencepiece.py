"""SentencePiece models."""

import os
from typing import Dict, List, Sequence

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import END_OF_TEXT, AbstractTokenizer, missing_library, required_setting


class SPMTokenizer(AbstractTokenizer):
    """vocab_file is a SentencePiece .model file. The end of a document is the piece "<|endoftext|>", or the model's
    own end of sentence where that piece is absent."""

    @classmethod
    def from_args(cls, args) -> "SPMTokenizer":
        """Raises DataError if the file is missing or no model."""
        path = required_setting(args, "vocab_file", "the path of a SentencePiece .model file")
        if not os.path.isfile(path):
            raise DataError(f"vocab_file={path} not found")
        return cls(path)

    def __init__(self, path: str):
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise missing_library("sentencepiece") from error
        self.source = f"vocab_file={path}"
        try:
            self.tokenizer = SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as error:
            raise DataError(f"{self.source} is not a SentencePiece model: {error}") from error
        self._eod = self._piece(END_OF_TEXT)
        if self._eod is None and self.tokenizer.eos_id() >= 0:
            self._eod = self.tokenizer.eos_id()
        self.pad = self.tokenizer.pad_id() if self.tokenizer.pad_id() >= 0 else None

    def _piece(self, text: str):
        """The number of a piece, None if absent: the library gives the unknown token's number then."""
        number = self.tokenizer.piece_to_id(text)
        return number if self.tokenizer.id_to_piece(number) == text else None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_piece_size()

    @property
    def vocab(self) -> Dict[str, int]:
        return {self.tokenizer.id_to_piece(number): number for number in range(self.vocab_size)}

    def tokenize(self, text: str) -> List[int]:
        return self.tokenizer.encode(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(token) for token in token_ids])
