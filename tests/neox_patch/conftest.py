"""The repository of GPT-NeoX under test, its states as folders, plain and patched; all made once."""

import pytest

from tests.neox_patch import checkouts

REASON = f"set {checkouts.VARIABLE} to a git repository of GPT-NeoX (a clone or a bare one) to try the patch on it"
HEAD = "HEAD"


def pytest_generate_tests(metafunc):
    """A test that takes `state` runs for every known state that the repository has, and for its HEAD."""
    if "state" in metafunc.fixturenames:
        repo = checkouts.repository()
        names = [] if repo is None else checkouts.states(repo)
        if repo is not None and not any(checkouts.same_commit(repo, HEAD, name) for name in names):
            names.append(HEAD)
        metafunc.parametrize(
            "state", names or [pytest.param("none", marks=pytest.mark.skip(reason=REASON))], scope="session"
        )


@pytest.fixture(scope="session")
def repo():
    """The repository; skips if none is named."""
    if checkouts.repository() is None:
        pytest.skip(REASON)
    return checkouts.repository()


@pytest.fixture(scope="session")
def plain(repo, state, tmp_path_factory):
    """A state as it is."""
    return checkouts.checkout_at(repo, state, tmp_path_factory.getbasetemp() / "plain" / state)


@pytest.fixture(scope="session")
def new(repo, state, tmp_path_factory):
    """A state with the patch."""
    folder = tmp_path_factory.getbasetemp() / "patched" / state
    return folder if folder.exists() else checkouts.patched(checkouts.checkout_at(repo, state, folder))
