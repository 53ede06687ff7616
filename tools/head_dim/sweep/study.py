"""A study: which models are trained, with which seeds, and what they are compared with. Read from one YAML file.

    name: head_dim at equal parameters
    about: one or two sentences for the report
    base: [model.yml]                    # YAML files of settings, merged, or settings as a mapping
    settings: {train_iters: 200}         # put over them
    data: {source: pydocs, max_bytes: 2000000, vocab_size: 1024}     # or without, and data_path in the settings
    vary: {head_dim: [16, 32, 64]}       # all combinations; a dot reaches into a mapping: optimizer.params.lr
    variants: [{name: wide, settings: {head_dim: 64}}]               # instead of vary
    at_equal: params                     # or flops: each is made to cost what the baseline costs ...
    adjust: ffn_hidden_size              # ... by this, or by num_attention_heads ...
    tolerance: 0.01                      # ... as near as this
    seeds: [1, 2, 3]
    baseline: head_dim 16                # a variant's name; the first one if absent

Paths are as for training, relative to the folder where the command is given.
"""

import copy
import itertools
import json
import os
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from megatron.errors import ConfigError
from megatron.neox_arguments.loading import load_files, nearest, parse

AT_EQUAL = ("params", "flops")
ADJUST = {"ffn_hidden_size": "ffn", "num_attention_heads": "heads"}
"""A setting, and what tools.head_dim.compare calls it."""
KEYS = (
    "name", "about", "base", "settings", "data", "vary", "variants", "at_equal", "adjust", "tolerance", "seeds",
    "baseline",
)  # fmt: skip
DATA_KEYS = ("source", "max_bytes", "vocab_size")
OWNED = ("seed", "save", "load", "log_dir", "tensorboard_dir", "exit_interval", "config_files")
"""Settings that the sweep makes for each run; those of base files are left out."""
OF_DATA = ("data_path", "train_data_paths", "valid_data_paths", "tokenizer_type", "vocab_file", "merge_file")
"""Settings that follow from `data`."""
PYDOCS = "pydocs"


@dataclass(frozen=True)
class Data:
    """Text that the sweep prepares: pydocs, or files and folders of .jsonl or .txt, and a tokenizer trained on it."""

    source: str
    max_bytes: Optional[int] = None
    vocab_size: int = 1024


@dataclass(frozen=True)
class Variant:
    """One model. changes: settings, with dotted names, over those of the study."""

    name: str
    changes: Dict[str, Any]

    @property
    def slug(self) -> str:
        """The name as a folder."""
        return re.sub(r"[^A-Za-z0-9.]+", "_", self.name).strip("_.")


@dataclass(frozen=True)
class Study:
    """settings: what all variants share."""

    name: str
    about: str
    settings: Dict[str, Any]
    variants: Tuple[Variant, ...]
    seeds: Tuple[int, ...]
    baseline: str
    data: Optional[Data] = None
    at_equal: Optional[str] = None
    adjust: str = "ffn_hidden_size"
    tolerance: float = 0.01

    def settings_of(self, variant: Variant) -> Dict[str, Any]:
        """All settings of a variant."""
        settings = copy.deepcopy(self.settings)
        for key, value in variant.changes.items():
            put(settings, key, copy.deepcopy(value))
        return {key: _absolute(key, value) for key, value in settings.items()}


def load_study(path: str) -> Study:
    """Read and check a study. Raises ConfigError with every problem."""
    try:
        with open(path, encoding="utf-8") as file:
            contents = parse(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a study: {error}") from None
    return study_of(contents, path)


def study_of(contents: Dict[str, Any], path: str = "") -> Study:
    """The study that a mapping describes. Raises ConfigError with every problem."""
    return _Reader(contents, path).study()


def put(settings: Dict[str, Any], key: str, value: Any) -> None:
    """Set a setting; a dotted name reaches into mappings."""
    *outer, last = key.split(".")
    for name in outer:
        inner = settings.get(name)
        settings[name] = inner if isinstance(inner, dict) else {}
        settings = settings[name]
    settings[last] = value


def _absolute(key: str, value: Any) -> Any:
    """Paths of data and tokenizers as they are from any folder; names of tokenizers stay names."""
    if isinstance(value, list) and key.endswith("data_paths"):
        return [os.path.abspath(path) if isinstance(path, str) else path for path in value]
    if isinstance(value, str) and (
        key == "data_path" or (key in ("vocab_file", "merge_file") and os.path.exists(value))
    ):
        return os.path.abspath(value)
    return value


class _Reader:
    """Collects the problems of a study, so that they are told together."""

    def __init__(self, contents: Dict[str, Any], path: str):
        self._contents = contents
        self._path = path
        self._problems: List[str] = [_unknown(key, KEYS) for key in contents if key not in KEYS]

    def study(self) -> Study:
        data = self._data()
        settings = self._settings(data)
        variants = self._variants()
        study = Study(
            name=self._text("name") or _stem(self._path),
            about=self._text("about"),
            settings=settings,
            variants=variants,
            seeds=self._seeds(),
            baseline=self._baseline(variants),
            data=data,
            at_equal=self._choice("at_equal", AT_EQUAL, None),
            adjust=self._choice("adjust", ADJUST, "ffn_hidden_size"),
            tolerance=self._tolerance(),
        )
        self._refuse_owned(study)
        if self._problems:
            raise ConfigError([f"{self._path}: {problem}" if self._path else problem for problem in self._problems])
        return study

    def _problem(self, text: str) -> None:
        self._problems.append(text)

    def _of_kind(self, key: str, kind: type, what: str, default: Any) -> Any:
        value = self._contents.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            self._problem(f"{key}={value!r}: is no {what}")
            return default
        return value

    def _text(self, key: str) -> str:
        return self._of_kind(key, str, "text", "").strip()

    def _choice(self, key: str, choices: Any, default: Optional[str]) -> Any:
        value = self._contents.get(key, default)
        if value is not None and value not in choices:
            self._problem(f"{key}={value!r}: must be {' or '.join(choices)}")
            return default
        return value

    def _tolerance(self) -> float:
        value = self._of_kind("tolerance", (int, float), "number", 0.01)
        if not 0 < value < 1:
            self._problem(f"tolerance={value}: is a part of the baseline's cost, more than 0 and less than 1")
        return value

    def _seeds(self) -> Tuple[int, ...]:
        seeds = self._of_kind("seeds", list, "list of whole numbers", [1])
        if not seeds or any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in seeds):
            self._problem(f"seeds={seeds}: must be whole numbers from 0 on, at least one")
        elif len(set(seeds)) < len(seeds):
            self._problem(f"seeds={seeds}: one stands there twice")
        return tuple(seeds)

    def _data(self) -> Optional[Data]:
        given = self._contents.get("data")
        if given is None:
            return None
        given = {"source": given} if isinstance(given, str) else given
        if not isinstance(given, dict) or not isinstance(given.get("source"), str):
            self._problem(f"data={given!r}: must name a text, {PYDOCS} or files, or be a mapping with `source`")
            return None
        for key in given:
            if key not in DATA_KEYS:
                self._problem("data: " + _unknown(key, DATA_KEYS))
        for key in ("max_bytes", "vocab_size"):
            value = given.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                self._problem(f"data: {key}={value!r}: must be a whole number from 1 on")
        known = {key: value for key, value in given.items() if key in DATA_KEYS and value is not None}
        return Data(**known)

    def _settings(self, data: Optional[Data]) -> Dict[str, Any]:
        base = self._contents.get("base") or {}
        if isinstance(base, str):
            base = [base]
        if isinstance(base, list):
            try:
                files = load_files([str(path) for path in base])[0]
                base = {key: value for key, value in files.items() if key not in OWNED}
            except ConfigError as error:
                self._problems += [f"base: {problem}" for problem in error.problems]
                base = {}
        elif not isinstance(base, dict):
            self._problem(f"base={base!r}: must be settings, or a list of YAML files")
            base = {}
        settings = copy.deepcopy(base)
        if data is not None:
            settings = {key: value for key, value in settings.items() if key not in OF_DATA}
        for key, value in self._of_kind("settings", dict, "mapping", {}).items():
            if data is not None and key in OF_DATA:
                self._problem(f"settings: {key}={value!r}: follows from `data`; leave one of the two out")
            put(settings, str(key), value)
        return settings

    def _variants(self) -> Tuple[Variant, ...]:
        vary, listed = self._of_kind("vary", dict, "mapping", None), self._of_kind("variants", list, "list", None)
        if (vary is None) == (listed is None):
            self._problem("give either vary, settings with lists of values, or variants, a list of named settings")
            return ()
        variants = self._combinations(vary) if vary is not None else self._listed(listed)
        seen: Dict[str, str] = {}
        for variant in variants:
            if not variant.slug or variant.slug in seen:
                other = seen.get(variant.slug, "a folder without a name")
                self._problem(f"variant {variant.name!r} would share a folder with {other!r}; give it another name")
            seen[variant.slug] = variant.name
        if not variants:
            self._problem("there is no variant")
        return tuple(variants)

    def _combinations(self, vary: Dict[str, Any]) -> List[Variant]:
        for key, values in vary.items():
            if not isinstance(values, list) or not values:
                self._problem(f"vary: {key}={values!r}: must be a list of values")
                return []
        found = []
        for values in itertools.product(*vary.values()):
            changes = dict(zip(map(str, vary), values, strict=True))
            found.append(
                Variant(", ".join(f"{_short(key)} {_shown(value)}" for key, value in changes.items()), changes)
            )
        return found

    def _listed(self, listed: List[Any]) -> List[Variant]:
        found = []
        for number, each in enumerate(listed, 1):
            if not isinstance(each, dict) or not isinstance(each.get("name"), str) or set(each) - {"name", "settings"}:
                self._problem(f"variants: number {number} must be {{name: ..., settings: {{...}}}}")
            elif not isinstance(each.get("settings") or {}, dict):
                self._problem(f"variants: {each['name']}: settings={each['settings']!r}: must be a mapping")
            else:
                found.append(Variant(each["name"], dict(each.get("settings") or {})))
        return found

    def _baseline(self, variants: Tuple[Variant, ...]) -> str:
        names = [variant.name for variant in variants]
        wanted = self._text("baseline") or (names[0] if names else "")
        if names and wanted not in names:
            self._problem(f"baseline={wanted!r}: is none of the variants, which are {', '.join(names)}")
        return wanted

    def _refuse_owned(self, study: Study) -> None:
        names = {*study.settings, *(key for variant in study.variants for key in variant.changes)}
        for key in sorted(names & set(OWNED)):
            self._problem(f"{key}: is set by the sweep for each run" + ("; use seeds" if key == "seed" else ""))
        if study.data is None and not any(study.settings.get(key) for key in ("data_path", "train_data_paths")):
            self._problem(f"there is no data: give `data`, for example {PYDOCS}, or data_path in the settings")


def _unknown(key: Any, known: Tuple[str, ...]) -> str:
    close = nearest(str(key), known)
    return f"{key}: is no key here" + (f"; did you mean {close}?" if close else f"; there are {', '.join(known)}")


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0] or "study"


def _short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
