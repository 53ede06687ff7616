"""Check a value against a field's annotation, and bring it to the one form the rest of the code relies on."""

import math
import typing
from typing import Any, List, Literal, Optional, Tuple, Union

from megatron.neox_arguments.loading import nearest

_TOO_LARGE = 2**63
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "a mapping",
    Any: "anything",
    list: "a list",
}


class Mismatch(Exception):
    """The value is not of the annotated type."""


def check(name: str, value: Any, annotation: Any) -> Tuple[Any, Optional[str]]:
    """Return (normalised value, None), or (value, problem).

    Types match exactly: a bool is never a number, and 3.0 is not a whole number; only a whole number may stand for
    a float. A choice is matched without regard to case and returned in its documented spelling. None always passes.
    """
    if value is None:
        return None, None
    try:
        return normalise(value, annotation), None
    except Mismatch:
        return value, f"{name}={value!r} must be {describe(annotation)}{_instead(value, annotation)}"


def normalise(value: Any, annotation: Any) -> Any:
    """`value` as the annotation wants it. Raises Mismatch if it is of another type."""
    if annotation is Any:
        return value
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Union:
        return _normalise_union(value, arguments)
    if origin is Literal:
        return _normalise_choice(value, arguments)
    if origin is list:
        if type(value) is not list:
            raise Mismatch
        return [normalise(item, arguments[0]) for item in value]
    if annotation is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise Mismatch
        return float(value)
    if type(value) is not (origin or annotation) or (type(value) is int and abs(value) >= _TOO_LARGE):
        raise Mismatch
    return value


def describe(annotation: Any) -> str:
    """The annotation in words, for error messages."""
    origin = typing.get_origin(annotation)
    arguments = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
    if origin is Union:
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin is list:
        return f"a list of items that are each {describe(arguments[0])}"
    return _NAMES.get(annotation, str(annotation))


def _instead(value: Any, annotation: Any) -> str:
    """What the value is, or for a misspelt choice the choice that was probably meant."""
    close = nearest(value.lower(), _choices(annotation)) if isinstance(value, str) else ""
    return f"; did you mean {close}?" if close else f", not {_kind(value)}"


def _choices(annotation: Any) -> List[str]:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return [choice for choice in arguments if isinstance(choice, str)]
    return [choice for argument in arguments for choice in _choices(argument)]


def _normalise_union(value: Any, members: Tuple[Any, ...]) -> Any:
    if type(value) in members:  # an int stays an int where int and float are both allowed
        return normalise(value, type(value))
    for member in members:
        try:
            return normalise(value, member)
        except Mismatch:
            continue
    raise Mismatch


def _normalise_choice(value: Any, choices: Tuple[Any, ...]) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    by_lower_case = {choice.lower(): choice for choice in choices if isinstance(choice, str)}
    if isinstance(value, str) and value.lower() in by_lower_case:
        return by_lower_case[value.lower()]
    raise Mismatch


def _kind(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "an infinite or undefined number"
    if type(value) is int and abs(value) >= _TOO_LARGE:
        return "one of more than 63 bits"
    kinds: List[Tuple[type, str]] = [
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a float"),
        (str, "this string"),
        (list, "a list"),
        (dict, "a mapping"),
    ]
    return next((text for kind, text in kinds if type(value) is kind), type(value).__name__)
