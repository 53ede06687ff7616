"""Read YAML and JSON config files and merge them into one flat dict of argument names and values."""

import difflib
import json
import os
import re
from typing import Any, Dict, Iterable, List, Sequence, Tuple

import yaml

from megatron.errors import ConfigError

_FLOAT = re.compile(
    r"""^(?:
        [-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
      | [-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
      | [-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
      | [-+]?\.(?:inf|Inf|INF)
      | \.(?:nan|NaN|NAN)
    )$""",
    re.VERBOSE,
)
_FLOAT_TAG = "tag:yaml.org,2002:float"
_DROPPED_TAGS = (_FLOAT_TAG, "tag:yaml.org,2002:timestamp")


class ConfigLoader(yaml.SafeLoader):
    """YAML 1.2's idea of a float (1e-5 is one, 1:30 is not), no dates, and no key given twice."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _DROPPED_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node, deep=False):
        """As SafeLoader, but a repeated key is an error: the first value would be lost without a word."""
        seen = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} is set twice, first in line {seen[key]}", key_node.start_mark
                )
            if isinstance(key, str):
                seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


ConfigLoader.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+0123456789."))


def load_files(paths: Sequence[str]) -> Tuple[Dict[str, Any], Dict[str, str]]:
    """Merge config files into (values with `_` in their names, raw text of each file by its base name).

    Raises ConfigError with every problem found: a file that is missing or not valid YAML or JSON, two files with
    one base name (a checkpoint keeps them in one folder), a key in two files.
    """
    values: Dict[str, Any] = {}
    origin: Dict[str, str] = {}
    texts: Dict[str, str] = {}
    full_paths: Dict[str, str] = {}
    problems: List[str] = []
    for path in map(str, paths):
        name = os.path.basename(path)
        if name in full_paths:
            problems.append(_same_name_problem(name, full_paths[name], path))
            continue
        full_paths[name] = path
        try:
            text = _read(path)
            content = parse(text, path)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        texts[name] = text
        for raw_key, value in content.items():
            key = raw_key.replace("-", "_")
            if key in values:
                problems.append(f"{raw_key} is set in {origin[key]} and again in {path}; keep one of the two")
                continue
            values[key], origin[key] = value, path
    if problems:
        raise ConfigError(problems)
    return values, texts


def parse(text: str, path: str) -> Dict[str, Any]:
    """The mapping in one file's text. Raises ConfigError naming the file and, for a syntax error, the line."""
    try:
        content = _parse_json(text) if path.endswith(".json") else yaml.load(text, Loader=ConfigLoader)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a config: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}; a config file is a mapping of keys to values")
    wrong_keys = [key for key in content if not isinstance(key, str)]
    if wrong_keys:
        raise ConfigError([f"{path}: the key {key!r} is not a name" for key in wrong_keys])
    return content


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`, or "" if none is like it."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_neighbour_hint(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _neighbour_hint(path: str) -> str:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f" (there is no folder {folder})"
    close = nearest(os.path.basename(path), os.listdir(folder))
    return f"; did you mean {os.path.join(os.path.dirname(path), close)}?" if close else ""


def _parse_json(text: str) -> Any:
    def unique(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} set twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique) if text.strip() else None


def _same_name_problem(name: str, first: str, second: str) -> str:
    if os.path.realpath(first) == os.path.realpath(second):
        return f"{second} is given twice; name each config file once"
    return (
        f"{first} and {second} have the same name {name}; a checkpoint keeps all config files in one folder, "
        "so rename one"
    )
