"""The tokenizer of a model that is imported: the settings for it, and what they do not say."""

import os
from typing import Any, Dict, List, Optional, Set, Tuple

from megatron.convert import side_files
from megatron.errors import DataError
from megatron.tokenizer.sentencepiece import SPMTokenizer

_MAKE = "AutoTokenizer.from_pretrained(SOURCE).save_pretrained(FOLDER)"

Found = Tuple[Dict[str, Any], List[str]]


def tokenizer_settings(source: str, kept_in: str) -> Found:
    """(settings, notes) for the tokenizer in a Hugging Face folder that is being copied to `kept_in`.

    eod_token is the end of text that its tokenizer_config.json names, by which transformers stops generating. Notes
    say what has to be done before the settings work, or what they leave out.
    """
    if os.path.isfile(os.path.join(source, side_files.TOKENIZER_JSON)):
        path = os.path.join(kept_in, side_files.TOKENIZER_JSON)
        return _with_end({"tokenizer_type": "HFTokenizer", "vocab_file": path}, _end_token(source)), []
    if os.path.isfile(os.path.join(source, side_files.TOKENIZER_MODEL)):
        return _sentencepiece(source, kept_in)
    note = f"the source has no tokenizer.json and no tokenizer.model; put a tokenizer.json into {kept_in}"
    return {"tokenizer_type": "HFTokenizer", "vocab_file": kept_in}, [note]


def _sentencepiece(source: str, kept_in: str) -> Found:
    path = os.path.join(kept_in, side_files.TOKENIZER_MODEL)
    settings, end = {"tokenizer_type": "SPMTokenizer", "vocab_file": path}, _end_token(source)
    try:
        vocabulary = SPMTokenizer(os.path.join(source, side_files.TOKENIZER_MODEL)).vocab
    except DataError as error:
        return settings, [f"tokenizer.model could not be tried: {' '.join(str(error).split())}"]
    missing = sorted(_added_tokens(source) - set(vocabulary))
    notes = []
    if missing:
        notes.append(
            f"{', '.join(missing)}: added to tokenizer.model by transformers, and unknown to SPMTokenizer; if they are "
            f"needed, make a tokenizer.json of it ({_MAKE}) and import again"
        )
    return _with_end(settings, end if end in vocabulary else None), notes


def _with_end(settings: Dict[str, Any], end: Optional[str]) -> Dict[str, Any]:
    return settings if end is None else {**settings, "eod_token": end}


def _end_token(folder: str) -> Optional[str]:
    """The text of the end token; None if none is named."""
    return _text(side_files.read_json(folder, side_files.TOKENIZER_CONFIG).get("eos_token"))


def _added_tokens(folder: str) -> Set[str]:
    """What transformers reads beside the tokenizer's own file, in each of the places that it may be in."""
    config = side_files.read_json(folder, side_files.TOKENIZER_CONFIG)
    special = side_files.read_json(folder, "special_tokens_map.json")
    found = {_text(table.get(f"{role}_token")) for table in (config, special) for role in ("bos", "eos", "pad", "unk")}
    decoder = config.get("added_tokens_decoder")
    found |= {_text(entry) for entry in (decoder.values() if isinstance(decoder, dict) else ())}
    return ({*side_files.read_json(folder, "added_tokens.json")} | found) - {None}


def _text(token: Any) -> Optional[str]:
    """Of a token that a file holds plain or with its properties."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
