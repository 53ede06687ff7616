"""From the values a user gave to the full set: check names and types, derive, validate, report everything at once."""

import re
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Dict, List, Mapping, Optional

from megatron.errors import ConfigError
from megatron.neox_arguments.derive import derive
from megatron.neox_arguments.fields import GROUPS, defaults
from megatron.neox_arguments.loading import nearest
from megatron.neox_arguments.support import refused_settings
from megatron.neox_arguments.types import check
from megatron.neox_arguments.validate import problems_of

_NEVER_SETTINGS = {
    "attention_type": "attention_config",
    "autotuning_config": "autotuning",
    "decay_lr_to": "min_lr",
    "save_interval": "checkpoint_factor",
    "warmup_iters": "warmup",
}
"""Keys in configurations that come with GPT-NeoX although it does not know them, and the setting that was meant."""


@dataclass(frozen=True)
class Resolved:
    """What was given, in normalised form, and the value of every argument that follows from it."""

    given: Dict[str, Any]
    values: Dict[str, Any]


def resolve(raw: Mapping[str, Any], world_size: Optional[int] = None) -> Resolved:
    """Turn argument values as written in a config into the complete set.

    world_size is the number of processes, where known. Null means "as if not written".
    gradient_accumulation_steps follows from the batch sizes unless it is written.

    Raises ConfigError with every problem found: unknown keys, wrong types, values that do not fit together, features
    that are not built.
    """
    given, suspects, problems = _check_names_and_types(raw)
    values = {**defaults(), **{name: value for name, value in given.items() if value is not None}}
    if given.get("gradient_accumulation_steps") is None:
        values["gradient_accumulation_steps"] = None
    values.update(derive(values, world_size))
    found = refused_settings(values) + problems_of(values, given)
    problems += [problem for problem in dict.fromkeys(found) if not _mentions(problem, suspects)]
    if problems:
        raise ConfigError(problems)
    return Resolved(given, values)


@cache
def annotations() -> Mapping[str, Any]:
    """Type annotation of every argument."""
    return {name: hint for group in GROUPS for name, hint in typing.get_type_hints(group).items()}


def _check_names_and_types(raw: Mapping[str, Any]):
    """(normalised values, names whose value cannot be used, problems). Unusable values are left out."""
    hints = annotations()
    given: Dict[str, Any] = {}
    suspects: List[str] = []
    problems: List[str] = []
    for key, value in raw.items():
        if key not in hints:
            close = _NEVER_SETTINGS.get(key) or nearest(str(key), hints)
            problems.append(f"{key} is not a known setting" + (f"; did you mean {close}?" if close else ""))
            suspects.append(close if close and close not in raw else str(key))
            continue
        value, problem = check(key, value, hints[key])
        if problem:
            problems.append(problem)
            suspects.append(key)
        else:
            given[key] = value
    return given, suspects, problems


def _mentions(problem: str, names: List[str]) -> bool:
    """Whether a problem may only follow from a value that was already reported and left out."""
    return any(re.search(rf"\b{re.escape(name)}\b", problem) for name in names)
