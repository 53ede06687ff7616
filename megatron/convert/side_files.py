"""What belongs to a model beside its weights: the tokenizer's files, special tokens, the true size of the vocabulary.

An import keeps the source's own files in `<import>/huggingface/`, and the config's vocab_file points into it. So they
are found again by an export of that checkpoint, and of every checkpoint trained from it with that config.
"""

import json
import os
import shutil
from typing import Any, Dict, List, Mapping, Optional

from megatron.convert.hf_writer import sync_file
from megatron.errors import ConversionError

FOLDER = "huggingface"
TOKENIZER_JSON, TOKENIZER_MODEL, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    TOKENIZER_MODEL,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def copy_files(names, source: str, target: str) -> List[str]:
    """Copy those of the files that exist into a folder, onto the disk; returns their names."""
    found = [name for name in names if os.path.isfile(os.path.join(source, name))]
    for name in found:
        shutil.copyfile(os.path.join(source, name), os.path.join(target, name))
        sync_file(os.path.join(target, name))
    return found


def folder_of(checkpoint: str, settings: Mapping[str, Any], of_vocabulary: bool = False) -> Optional[str]:
    """The Hugging Face files of a checkpoint: beside it, or where its vocab_file is; None if there are none.

    checkpoint: a global_step<N> folder. settings: of its YAML files. of_vocabulary: only the second place counts, and
    there has to be a tokenizer; raises ConversionError if there is none.
    """
    beside = os.path.join(os.path.dirname(os.path.abspath(checkpoint)), FOLDER)
    candidates = [] if of_vocabulary else [beside]
    if settings.get("vocab_file"):
        path = str(settings["vocab_file"])
        candidates.append(path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path)))
    known = (TOKENIZER_CONFIG,) if of_vocabulary else (CONFIG, TOKENIZER_CONFIG)
    found = next((path for path in candidates if any(os.path.isfile(os.path.join(path, x)) for x in known)), None)
    if found is None and of_vocabulary:
        raise ConversionError(
            f"vocab_file={settings.get('vocab_file')} is not in the folder of a Hugging Face tokenizer: there is no "
            f"{TOKENIZER_CONFIG} beside it; leave --vocab-is-hf-tokenizer out"
        )
    return found


def read_json(folder: Optional[str], name: str) -> Dict[str, Any]:
    """A table in a folder; {} if there is no folder, file or readable table."""
    try:
        with open(os.path.join(folder or "", name), encoding="utf-8") as file:
            contents = json.load(file)
    except (OSError, ValueError):
        return {}
    return contents if folder and isinstance(contents, dict) else {}
