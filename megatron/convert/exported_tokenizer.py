"""The tokenizer of an exported model, and what is known of its vocabulary."""

import os
from types import SimpleNamespace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

from megatron.convert import side_files
from megatron.errors import ConversionError, NeoXError
from megatron.neox_arguments.fields import defaults
from megatron.tokenizer import build_tokenizer


class Vocabulary(NamedTuple):
    """size: rows of the exported tables. tokens: bos_token_id, eos_token_id and pad_token_id, None where unknown."""

    size: int
    tokens: Dict[str, Any]
    notes: List[str]

    def special_tokens(self, pad_token_id: Optional[int]) -> Dict[str, Any]:
        """The keys of config.json; always all three, because transformers has other defaults for some classes."""
        unknown = dict.fromkeys(side_files.SPECIAL_TOKENS)
        chosen = {} if pad_token_id is None else {"pad_token_id": pad_token_id}
        return {**unknown, **self.tokens, **chosen}


def known_vocabulary(
    files: Optional[str], settings: Mapping[str, Any], rows: int, vocab_size: Optional[int]
) -> Vocabulary:
    """The vocabulary of a checkpoint whose tables have `rows` rows, padding included.

    Its size is vocab_size if given; else that of the Hugging Face config in `files`, as after an import; else the
    tokenizer's; else, with a note, `rows`. Raises ConversionError if a size asked for is larger than `rows`.
    """
    if vocab_size is not None and vocab_size > rows:
        raise ConversionError(f"vocab-size={vocab_size}: the checkpoint's tables have only {rows} rows")
    original = side_files.read_json(files, side_files.CONFIG)
    tokens = {key: original[key] for key in side_files.SPECIAL_TOKENS if key in original}
    size, notes = original.get("vocab_size"), []
    if not isinstance(size, int) or size > rows:
        size = None
    if size is None or not tokens:
        found = _of_tokenizer(settings)
        if found is not None:
            size = size or (found.vocab_size if found.vocab_size <= rows else None)
            tokens = tokens or _tokens(found)
    if vocab_size is None and size is None:
        notes.append(f"the tokenizer is not here, so all {rows} rows are kept, padding included; see --vocab-size")
    return Vocabulary(vocab_size or size or rows, tokens, notes)


def save_tokenizer(
    files: Optional[str], settings: Mapping[str, Any], out: str, pad_token_id: Optional[int] = None
) -> str:
    """Write the tokenizer's files into `out`; returns a line that says what was done.

    The files of a Hugging Face folder are copied; a tokenizer.json alone gets what AutoTokenizer needs beside it.
    """
    names = side_files.copy_files(side_files.TOKENIZER_FILES, files, out) if files else []
    if side_files.TOKENIZER_CONFIG not in names:
        if side_files.TOKENIZER_MODEL in names:
            padding = "" if pad_token_id is None else "; --pad-token-id is in config.json alone"
            return f"tokenizer.model was copied, and there was no tokenizer_config.json to copy{padding}"
        kind = str(settings.get("tokenizer_type"))
        path = settings.get("vocab_file")
        if kind.lower() != "hftokenizer" or not path or not os.path.isfile(_json_path(path)):
            return f"no tokenizer was written: tokenizer_type={kind} vocab_file={path} is not a tokenizer.json here"
        _write_fast_tokenizer(_json_path(path), settings, out)
    if pad_token_id is not None:
        _set_padding(out, pad_token_id)
    return "the tokenizer was written too"


def _json_path(path: str) -> str:
    return os.path.join(path, side_files.TOKENIZER_JSON) if os.path.isdir(path) else path


def _write_fast_tokenizer(path: str, settings: Mapping[str, Any], out: str) -> None:
    from transformers import PreTrainedTokenizerFast

    found = _of_tokenizer(settings)
    named = {"eos_token": getattr(found, "_eod", None), "pad_token": getattr(found, "pad", None)}
    texts = {key: found.tokenizer.id_to_token(number) for key, number in named.items() if number is not None}
    PreTrainedTokenizerFast(tokenizer_file=path, **texts).save_pretrained(out)


def _set_padding(out: str, pad_token_id: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    text = tokenizer.convert_ids_to_tokens(pad_token_id)
    if text is None:
        raise ConversionError(f"pad-token-id={pad_token_id}: the tokenizer has no token of that number")
    tokenizer.pad_token = text
    tokenizer.save_pretrained(out)


def _of_tokenizer(settings: Mapping[str, Any]) -> Any:
    """The tokenizer that the settings name; None if it is not on this machine."""
    try:
        return build_tokenizer(SimpleNamespace(**{**defaults(), **settings}))
    except NeoXError:
        return None


def _tokens(tokenizer: Any) -> Dict[str, Any]:
    found = {"eos_token_id": tokenizer._eod, "pad_token_id": tokenizer.pad}
    return {key: number for key, number in found.items() if number is not None}
