"""The repository of GPT-NeoX under test, its states as folders, plain and patched; all made once."""

import functools

import pytest

from tests.neox_patch import checkouts, grid, runs

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


@pytest.hookimpl(tryfirst=True)  # before xdist looks for its groups
def pytest_collection_modifyitems(items):
    """All tests of a state in one process, which makes its checkouts and runs once (pytest-xdist, --dist loadgroup)."""
    for item in items:
        state = getattr(item, "callspec", None) and item.callspec.params.get("state")
        if state and "neox_patch" in str(item.path):
            item.add_marker(pytest.mark.xdist_group(f"GPT-NeoX {state}"))


@pytest.fixture(scope="session")
def repo():
    """The repository; skips if none is named."""
    if checkouts.repository() is None:
        pytest.skip(REASON)
    return checkouts.repository()


@pytest.fixture(scope="session")
def truths(tmp_path_factory):
    """This project's results, transformers', and the weights that all share."""
    return runs.Truths(tmp_path_factory.mktemp("truths"))


@pytest.fixture(scope="session")
def kept(truths, tmp_path_factory):
    """Function (repository, commit): the State, one for all tests, in whichever order the tests of states come."""
    return functools.cache(lambda repo, commit: runs.State(repo, commit, tmp_path_factory.mktemp(commit), truths))


@pytest.fixture(scope="session")
def tried(repo, state, kept):
    """A state of GPT-NeoX, with its runs."""
    return kept(repo, state)


@pytest.fixture(scope="session")
def plain(tried):
    """The folder of a state as it is."""
    return tried.plain


@pytest.fixture(scope="session")
def new(tried):
    """The folder of a state with the patch."""
    return tried.new


@pytest.fixture(params=grid.RANKS)
def tp(request):
    """Tensor-parallel ranks."""
    return request.param
