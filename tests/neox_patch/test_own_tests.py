"""A checkout's own tests, and the file that the patch places among them."""

import pytest

from tests.neox_patch import checkouts

PLACED = "tests/unit/test_head_dim.py"
RUN = ["tests/neox_args"]
"""Those of GPT-NeoX's tests that need neither a GPU nor the network."""


@pytest.fixture(scope="module")
def found(plain, new, tmp_path_factory):
    """(what came of the plain checkout's tests, of the patched one's)"""
    return (
        checkouts.run_tests(plain, RUN, tmp_path_factory.mktemp("plain")),
        checkouts.run_tests(new, [*RUN, PLACED], tmp_path_factory.mktemp("new")),
    )


def without_placed(nodes):
    """Names of tests, without their parameters: GPT-NeoX draws those anew each time."""
    return {name.split("[")[0] for name in nodes if "test_head_dim" not in name}


def test_own_tests_are_collected_and_end_as_before(found):
    before, after = found
    assert len(before["collected"]) > 100
    assert without_placed(before["collected"]) == without_placed(after["collected"])
    assert without_placed(before["errors"]) == without_placed(after["errors"])
    own = {name: outcome for name, outcome in after["outcomes"].items() if "test_head_dim" not in name}
    assert own == before["outcomes"] and list(own.values()).count("passed") > 5


def test_the_placed_file_passes(found):
    _, after = found
    outcomes = {name: outcome for name, outcome in after["outcomes"].items() if "test_head_dim" in name}
    errors = {name: text for name, text in after["errors"].items() if "test_head_dim" in name}
    assert not errors, "\n".join(errors.values())
    assert len(outcomes) > 20 and set(outcomes.values()) == {"passed"}, outcomes
