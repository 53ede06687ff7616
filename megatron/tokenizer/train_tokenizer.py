"""Training of a byte-level BPE tokenizer."""

import os
from typing import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.tokenizer import END_OF_TEXT, PADDING

SPECIAL_TOKENS = (END_OF_TEXT, PADDING)
"""Numbers 0 and 1."""


def train_tokenizer(texts: Iterable[str], save_path: str, tokenizer_type: str = "BPE", vocab_size: int = 52000) -> int:
    """Train on the texts and write a tokenizer.json for tokenizer_type HFTokenizer; returns its vocabulary size.

    All 256 bytes are in the vocabulary and nothing is normalised, so every text comes back unchanged.
    Raises ConfigError for another type or a vocabulary too small for the bytes, DataError if there is no text.
    """
    if tokenizer_type != "BPE":
        raise ConfigError(f"tokenizer_type={tokenizer_type}: only BPE tokenizers are trained")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size={vocab_size} must be at least {smallest}: the bytes and the special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    seen = _Counter(texts)
    tokenizer.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise DataError("no text to train a tokenizer on")
    temporary = f"{save_path}.tmp{os.getpid()}"
    tokenizer.save(temporary, pretty=True)
    os.replace(temporary, save_path)
    return tokenizer.get_vocab_size()


class _Counter:
    """Passes texts on and counts their characters."""

    def __init__(self, texts: Iterable[str]):
        self.texts = texts
        self.characters = 0

    def __iter__(self):
        for text in self.texts:
            self.characters += len(text)
            yield text
