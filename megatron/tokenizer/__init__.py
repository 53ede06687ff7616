"""Tokenizers under GPT-NeoX's names: `build_tokenizer(neox_args)` picks one by tokenizer_type."""

from megatron.tokenizer.tokenizer import TOKENIZERS, AbstractTokenizer, build_tokenizer

__all__ = ["TOKENIZERS", "AbstractTokenizer", "build_tokenizer"]
