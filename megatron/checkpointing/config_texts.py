"""Settings changed in the text of a config file, with comments and spelling left where that is possible."""

import json
import re
from typing import Any, Dict, Mapping, Tuple

import yaml

_VALUE = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\[[^\n#]*\]|[\w.+~-]+)"""
"""A number, word, string or list within one line."""


def with_setting(text: str, key: str, value: Any) -> Tuple[str, bool]:
    """(text, whether it sets `key`), with the value replaced; key is spelled with `_`, in the text perhaps with `-`.

    value is null, a truth value, a number or a string. A text that cannot be changed in place is written anew.
    """
    settings = yaml.safe_load(text) or {}
    spelled = [name for name in settings if name.replace("-", "_") == key]
    if not spelled:
        return text, False
    wanted = {**settings, spelled[0]: value}
    pattern = re.compile(rf"""^([^#\n]*?(?:\b|["']){spelled[0]}["']?\s*:\s*){_VALUE}""", re.MULTILINE)
    changed = pattern.sub(rf"\g<1>{json.dumps(value)}", text)
    return changed if _parsed(changed) == wanted else _anew(text, spelled[0], value), True


def with_settings(texts: Mapping[str, str], changes: Mapping[str, Any], rest: str) -> Dict[str, str]:
    """The texts of several files with `changes` made in them; what none of them sets goes into the file `rest`."""
    new = dict(texts)
    missing = dict(changes)
    for name, text in texts.items():
        for key, value in changes.items():
            text, found = with_setting(text, key, value)
            if found:
                missing.pop(key, None)
        new[name] = text
    if missing:
        new[rest] = yaml.safe_dump({**(yaml.safe_load(new.get(rest, "")) or {}), **missing})
    return new


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _anew(text: str, key: str, value: Any) -> str:
    try:
        return json.dumps({**json.loads(text), key: value}, indent=2)
    except json.JSONDecodeError:
        return yaml.safe_dump({**yaml.safe_load(text), key: value}, sort_keys=False)
