"""Tokenizers of the `tokenizers` library: GPT-2's vocab and merges files, and tokenizer.json files."""

import os
from typing import Dict, List, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import END_OF_TEXT, PADDING, AbstractTokenizer, required_setting

END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Looked for in this order; GPT-NeoX's own first, then those of Llama 3, Llama and Mistral, Gemma."""
PADDING_TOKENS = (PADDING, "<|finetune_right_pad_id|>", "<pad>")


class _LibraryTokenizer(AbstractTokenizer):
    """Shared by both: everything but the way the tokenizer is made."""

    skip_special_tokens = False

    def __init__(self, tokenizer: Tokenizer, source: str):
        self.tokenizer = tokenizer
        self.source = source
        self._eod = self._first_of(END_TOKENS)
        self.pad = self._first_of(PADDING_TOKENS)

    def _first_of(self, tokens):
        numbers = (self.tokenizer.token_to_id(token) for token in tokens)
        return next((number for number in numbers if number is not None), None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token number: a vocabulary with gaps needs rows for them."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def vocab(self) -> Dict[str, int]:
        return self.tokenizer.get_vocab()

    def tokenize(self, text: str) -> List[int]:
        return self.tokenizer.encode(text).ids

    def tokenize_batch(self, texts: Sequence[str]) -> List[List[int]]:
        """Also for one text faster than `tokenize`: the library leaves out the places of the tokens in the text."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=self.skip_special_tokens)


class HFTokenizer(_LibraryTokenizer):
    """A tokenizer.json file. Special tokens are left out of detokenized text, as in GPT-NeoX."""

    skip_special_tokens = True

    @classmethod
    def from_args(cls, args) -> "HFTokenizer":
        """vocab_file is the tokenizer.json."""
        path = required_setting(args, "vocab_file", "the path of a tokenizer.json")
        if os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        _require_file("vocab_file", path)
        try:
            tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"vocab_file={path} is not a tokenizer.json of the tokenizers library: {error}") from error
        # Both are for batches of equal length; documents are neither cut nor filled here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, f"vocab_file={path}")


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE from its vocab.json and merges.txt."""

    @classmethod
    def from_args(cls, args) -> "GPT2BPETokenizer":
        """vocab_file is the vocab.json, merge_file the merges.txt."""
        vocab = required_setting(args, "vocab_file", "the path of GPT-2's vocab.json")
        merges = required_setting(args, "merge_file", "the path of GPT-2's merges.txt")
        _require_file("vocab_file", vocab)
        _require_file("merge_file", merges)
        source = f"vocab_file={vocab}"
        try:
            tokenizer = Tokenizer(models.BPE.from_file(vocab, merges))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{source} and merge_file={merges} are not a BPE vocabulary: {error}") from error
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if tokenizer.token_to_id(END_OF_TEXT) is None:
            raise DataError(f"{source} has no {END_OF_TEXT!r}; it is not GPT-2's vocabulary")
        tokenizer.add_special_tokens([END_OF_TEXT])
        return cls(tokenizer, source)


def _require_file(setting: str, path: str) -> None:
    if not os.path.isfile(path):
        raise DataError(
            f"{setting}={path} not found; `python prepare_data.py pydocs -d data` trains a tokenizer into "
            "data/pydocs/tokenizer.json"
        )
