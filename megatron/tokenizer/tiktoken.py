"""OpenAI's encodings, by name."""

from typing import Dict, List, Sequence

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import AbstractTokenizer, missing_library, required_setting


class TiktokenTokenizer(AbstractTokenizer):
    """vocab_file is the name of an encoding, such as cl100k_base. Special tokens written out in a text are read as
    ordinary text."""

    @classmethod
    def from_args(cls, args) -> "TiktokenTokenizer":
        """Raises DataError if the encoding is unknown or its file cannot be fetched."""
        return cls(required_setting(args, "vocab_file", "the name of an encoding, such as cl100k_base"))

    def __init__(self, name: str):
        try:
            import tiktoken
        except ImportError as error:
            raise missing_library("tiktoken") from error
        self.source = f"vocab_file={name}"
        if name not in tiktoken.list_encoding_names():
            raise DataError(f"{self.source} must be one of {', '.join(tiktoken.list_encoding_names())}")
        try:
            self.tokenizer = tiktoken.get_encoding(name)
        except Exception as error:  # network errors of whichever library tiktoken uses
            raise DataError(
                f"{self.source} could not be fetched ({type(error).__name__}); set the environment variable "
                "TIKTOKEN_CACHE_DIR to a folder that has it"
            ) from error
        self._eod = self.tokenizer.eot_token

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.n_vocab

    @property
    def vocab(self) -> Dict[str, int]:
        """By the token's bytes in Latin-1, because a token can be part of a character."""
        values = self.tokenizer.token_byte_values()
        return {value.decode("latin-1"): self.tokenizer.encode_single_token(value) for value in values}

    def tokenize(self, text: str) -> List[int]:
        return self.tokenizer.encode(text, disallowed_special=())

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(token) for token in token_ids], errors="replace")
