"""Type checks against annotations, and the normal form of choices and numbers."""

import math
from typing import Any, List, Literal, Optional, Union

import pytest

from megatron.neox_arguments.resolve import annotations
from megatron.neox_arguments.types import check, describe

Choice = Literal["GeLU", "relu"]


@pytest.mark.parametrize(
    "value, annotation, expected",
    [
        *((3, int, 3), (3, float, 3.0), (2.5, Optional[float], 2.5), (True, bool, True), ("x", str, "x")),
        *(({"a": 1}, Optional[dict], {"a": 1}), ([1], Optional[list], [1]), (None, int, None)),
        *(("gelu", Choice, "GeLU"), ("RELU", Optional[Choice], "relu"), (object, Any, object)),
        *((5, Union[int, float], 5), (5.5, Union[int, float], 5.5), ([1, 2], Union[int, List[int]], [1, 2])),
        *(("ALL", Union[int, List[int], Literal["all"]], "all"), ([1, 2], List[float], [1.0, 2.0])),
    ],
)
def test_accepted(value, annotation, expected):
    got, problem = check("name", value, annotation)
    assert problem is None and got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    "value, annotation",
    [
        *((True, int), (True, float), (1, bool), (3.0, int), ("3", int), ("3", float), (3, str), ([], dict)),
        *(("x", list), ((1,), list), (math.inf, float), (math.nan, float), ("tanh", Choice), (1, Choice)),
        *((["1"], List[int]), ([True], Union[int, List[int]]), (0, Literal[False]), (False, Literal[0, "all"])),
    ],
)
def test_refused(value, annotation):
    got, problem = check("the_key", value, Optional[annotation])
    assert got is value
    assert f"the_key={value!r}" in problem and describe(annotation) in problem


def test_every_argument_has_a_type_that_can_be_checked():
    for name, annotation in annotations().items():
        assert check(name, None, annotation) == (None, None)
        assert "typing." not in describe(annotation), name
        if annotation is not Any:
            assert check(name, object(), annotation)[1], name


@pytest.mark.parametrize("value", [0.5, "128", True, 128.0])
def test_head_dim_wants_a_whole_number(value):
    _, problem = check("head_dim", value, annotations()["head_dim"])
    assert "head_dim" in problem and repr(value) in problem and "whole number" in problem


def test_a_misspelt_choice_names_the_nearest():
    assert check("activation", "Sweglu", annotations()["activation"])[1].endswith("; did you mean swiglu?")
    assert "did you mean" not in check("activation", 3, annotations()["activation"])[1]
