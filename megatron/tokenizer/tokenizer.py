"""The choice of a tokenizer, and what every tokenizer can do."""

import importlib
from abc import ABC, abstractmethod
from typing import Dict, List, Optional, Sequence

from megatron.errors import ConfigError, DataError

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"

TOKENIZERS = {
    "GPT2BPETokenizer": "megatron.tokenizer.huggingface",
    "HFTokenizer": "megatron.tokenizer.huggingface",
    "HFGPT2Tokenizer": "megatron.tokenizer.huggingface_gpt2",
    "SPMTokenizer": "megatron.tokenizer.sentencepiece",
    "CharLevelTokenizer": "megatron.tokenizer.characters",
    "TiktokenTokenizer": "megatron.tokenizer.tiktoken",
}
"""tokenizer_type and the module that holds the class of that name; a module is imported when it is needed."""


class AbstractTokenizer(ABC):
    """Text to token numbers and back. `source` names the files it came from, for messages."""

    source: str = ""
    _eod: Optional[int] = None
    pad: Optional[int] = None
    """The padding token, None if the vocabulary has none."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, special ones included; every token number is below it."""

    @property
    def eod(self) -> int:
        """The token between documents. Raises DataError if the vocabulary has none."""
        if self._eod is None:
            raise DataError(
                f"{self.source} has no end-of-document token such as {END_OF_TEXT!r}; add one to the vocabulary"
            )
        return self._eod

    def end_documents_with(self, token: str) -> None:
        """Make `token` the end-of-document token. Raises DataError if it is not in the vocabulary."""
        if token not in self.vocab:
            raise DataError(f"eod_token={token!r} is not a token of {self.source}; write one of its vocabulary")
        self._eod = self.vocab[token]

    @property
    @abstractmethod
    def vocab(self) -> Dict[str, int]:
        """Token numbers by token text."""

    @property
    def inv_vocab(self) -> Dict[int, str]:
        """Token texts by token number."""
        return {number: token for token, number in self.vocab.items()}

    @abstractmethod
    def tokenize(self, text: str) -> List[int]:
        """The token numbers of a text. No end-of-document token is added."""

    def tokenize_batch(self, texts: Sequence[str]) -> List[List[int]]:
        """`tokenize` for each text; faster where the library has threads."""
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token numbers; bytes that are no UTF-8 become replacement characters."""


def build_tokenizer(args) -> AbstractTokenizer:
    """The tokenizer that tokenizer_type, vocab_file and merge_file ask for, with eod_token where that is set.

    Raises ConfigError for an unknown type or a missing setting, DataError for a missing or unreadable file, an
    optional library that is not installed, or an eod_token that the vocabulary does not have.
    """
    names = {name.lower(): name for name in TOKENIZERS}
    name = names.get(str(args.tokenizer_type).lower())
    if name is None:
        raise ConfigError(f"tokenizer_type={args.tokenizer_type} must be one of {', '.join(TOKENIZERS)}")
    tokenizer = getattr(importlib.import_module(TOKENIZERS[name]), name).from_args(args)
    if getattr(args, "eod_token", None) is not None:  # the data tools have no such option
        tokenizer.end_documents_with(args.eod_token)
    return tokenizer


def required_setting(args, setting: str, meaning: str) -> str:
    """The value of vocab_file or merge_file. Raises ConfigError if unset."""
    value = getattr(args, setting)
    if not value:
        raise ConfigError(f"{setting} is unset, and tokenizer_type={args.tokenizer_type} needs it: {meaning}")
    return value


def missing_library(library: str) -> DataError:
    """The error for an optional library that cannot be imported."""
    return DataError(
        f"the Python package {library!r} is not installed; `pip install -r requirements/requirements-tokenizers.txt`"
    )
