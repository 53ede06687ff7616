"""GPT-2's tokenizer as the `transformers` library loads it, with a padding token."""

from typing import Dict, List, Sequence

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import PADDING, AbstractTokenizer, missing_library


class HFGPT2Tokenizer(AbstractTokenizer):
    """vocab_file is a folder or a name on the Hugging Face hub; "gpt2" if unset."""

    @classmethod
    def from_args(cls, args) -> "HFGPT2Tokenizer":
        """Raises DataError if the tokenizer is neither a local folder nor can be fetched."""
        return cls(args.vocab_file or "gpt2")

    def __init__(self, name: str):
        try:
            from transformers import GPT2TokenizerFast
        except ImportError as error:
            raise missing_library("transformers") from error
        self.source = f"vocab_file={name}"
        try:
            self.tokenizer = GPT2TokenizerFast.from_pretrained(name)
        except Exception as error:  # the library's errors share no base: network, missing files, bad JSON
            raise DataError(
                f"{self.source} is not a folder with a GPT-2 tokenizer, and could not be fetched from the Hugging Face "
                f"hub ({type(error).__name__}); give a local folder"
            ) from error
        self.tokenizer.add_special_tokens({"pad_token": PADDING})
        self._eod = self.tokenizer.eos_token_id
        self.pad = self.tokenizer.pad_token_id

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def vocab(self) -> Dict[str, int]:
        return self.tokenizer.get_vocab()

    def tokenize(self, text: str) -> List[int]:
        return self.tokenizer.encode(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(token) for token in token_ids])
