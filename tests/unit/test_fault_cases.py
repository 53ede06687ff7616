"""Every fault in data/fault_cases.yml has tests, which exist and are not skipped, or a reason why it cannot be here."""

import ast
import functools
import re
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).parents[1]
FAULTS = yaml.safe_load((Path(__file__).parent / "data" / "fault_cases.yml").read_text())


@pytest.mark.parametrize("label", FAULTS)
def test_a_fault_has_its_tests_or_a_reason(label):
    entry = FAULTS[label]
    assert entry["fault"] and bool(entry.get("tests")) != bool(entry.get("cannot_be_here"))
    for test in entry.get("tests", ()):
        path, _, name = test.partition("::")
        function, _, case = name.partition("[")
        functions, words = _contents(path)
        assert function in functions, test
        assert not any("skip" in decorator for decorator in functions[function]), test
        assert not case or any(case.removesuffix("]") in text for text in words), test


def test_labels_in_tests_are_faults_of_the_list():
    used = {label for path in TESTS.rglob("*.py") for label in re.findall(r"BL-\d+", path.read_text())}
    assert used and used <= set(FAULTS)


@functools.cache
def _contents(path):
    """Functions of a test file with their decorators; and what the words of a case can be: strings, and calls."""
    tree = ast.parse((TESTS / path).read_text())
    functions = {
        node.name: [ast.unparse(decorator) for decorator in node.decorator_list]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    nodes = list(ast.walk(tree))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return functions, strings + [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
