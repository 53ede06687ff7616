"""head_dim as a function of depth: {schedule: progressive, base: 64, exponent: 0.3, multiple_of: 8}."""

import math
from typing import Any, Dict, List

_KEYS = ("schedule", "base", "exponent", "multiple_of")
_STEEPEST = 4
"""Any larger exponent is a slip of the pen, and soon no float."""


def scheduled_width(schedule: Dict[str, Any], layer_number: int) -> int:
    """base x (layer_number + 1) ^ exponent, rounded to the nearest multiple of multiple_of; halfway is rounded up, and
    the smallest width is one multiple."""
    multiple = schedule["multiple_of"]
    width = schedule["base"] * (layer_number + 1) ** schedule["exponent"]
    return max(1, math.floor(width / multiple + 0.5)) * multiple


def schedule_problems(name: str, schedule: Dict[str, Any]) -> List[str]:
    """What is wrong with a mapping given for the setting `name`; empty if nothing is."""
    unknown = [key for key in schedule if key not in _KEYS]
    missing = [key for key in _KEYS if key not in schedule]
    if unknown or missing:
        odd = (
            f"{', '.join(map(str, unknown))} is not one of its keys" if unknown else f"{', '.join(missing)} is missing"
        )
        return [f"{name}={schedule}: {odd}; write {{schedule: progressive, base: 64, exponent: 0.3, multiple_of: 8}}"]
    problems = []
    if schedule["schedule"] != "progressive":
        problems.append(f"{name}.schedule={schedule['schedule']!r} is not known; the only one is progressive")
    if not _is_number(schedule["base"]) or not 0 < schedule["base"] < 2**31:
        problems.append(f"{name}.base={schedule['base']!r} must be the width of the first layer, a number above 0")
    if not _is_number(schedule["exponent"]) or not -_STEEPEST <= schedule["exponent"] <= _STEEPEST:
        problems.append(f"{name}.exponent={schedule['exponent']!r} must be a number from -{_STEEPEST} to {_STEEPEST}")
    if type(schedule["multiple_of"]) is not int or schedule["multiple_of"] <= 0:
        problems.append(f"{name}.multiple_of={schedule['multiple_of']!r} must be a positive whole number")
    return problems


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
