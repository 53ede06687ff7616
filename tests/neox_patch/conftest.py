"""The repository of GPT-NeoX under test, its states as folders, plain and patched; all made once."""

import functools

import pytest

from tests.helpers.distributed import run_distributed
from tests.neox_patch import checkouts, engines, grid, truth
from tests.neox_patch import ours as our_program
from tools.neox_patch.changes import whole_patch
from tools.neox_patch.plan import make_plan

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
def plain(repo, state, tmp_path_factory):
    """A state as it is."""
    return checkouts.checkout_at(repo, state, tmp_path_factory.getbasetemp() / "plain" / state)


@pytest.fixture(scope="session")
def plan(plain):
    """What the patch would do to a state."""
    return make_plan(plain, whole_patch())


@pytest.fixture(scope="session")
def new(repo, state, plan, tmp_path_factory):
    """A state with the patch."""
    folder = tmp_path_factory.getbasetemp() / "patched" / state
    if not folder.exists():
        checkouts.patched(checkouts.checkout_at(repo, state, folder), plan)
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """{name: (Weights, {tp: checkpoint folder})} of every configuration with the new arguments."""
    root = tmp_path_factory.mktemp("weights")
    made = {}
    for number, (name, values) in enumerate(grid.WIDTHS.items()):
        masters = truth.Weights(grid.arguments(values), grid.VOCABULARY, seed=number)
        config = {key: value for key, value in grid.arguments(values).items() if key != "padded_vocab_size"}
        folders = {}
        for tp in grid.RANKS:
            if grid.splits(values, tp):
                folders[tp] = str(root / f"{number}_tp{tp}")
                masters.save(folders[tp], tp=tp, written_config=config)
        made[name] = (masters, folders)
    return made


@pytest.fixture(scope="session")
def ours(weights, tmp_path_factory):
    """{tp: {name: [this project's results of each rank]}}"""
    found = {}
    for tp in grid.RANKS:
        cases = {name: (grid.arguments(grid.WIDTHS[name]), weights[name][1][tp]) for name in grid.runs(grid.WIDTHS, tp)}
        arguments = (cases, grid.ids().numpy(), grid.PROMPTS, grid.NEW_TOKENS)
        folder = tmp_path_factory.mktemp("ours")
        ranks = run_distributed(tp, our_program.results, *arguments, tmp_path=folder, timeout=300)
        found[tp] = {name: [rank[name] for rank in ranks] for name in cases}
    return found


@pytest.fixture(scope="session")
def transformers_results(weights):
    """{name: transformers' results} of the configurations that it has."""
    arguments = (grid.ids(), grid.PROMPTS, grid.NEW_TOKENS)
    return {
        name: truth.transformers_results(weights[name][0], *arguments)
        for name, values in grid.WIDTHS.items()
        if grid.in_transformers(values)
    }


@pytest.fixture(scope="session")
def our_training(weights, tmp_path_factory):
    """{tp: [this project's training of each rank]}"""
    folder = str(tmp_path_factory.mktemp("our_training"))
    found = {}
    for tp in grid.RANKS:
        files = {name: weights[name][1][tp] for name in engines.NAMES}
        found[tp] = run_distributed(tp, engines.our_training, files, folder, tmp_path=folder, timeout=300)
    return found


@pytest.fixture(scope="session")
def saves(state, tmp_path_factory):
    """Function of tp: the folder in which the patched checkout has a checkpoint of each configuration it trained."""
    return lambda tp: str(tmp_path_factory.getbasetemp() / "saves" / f"{state} tp{tp}")


@pytest.fixture(scope="session")
def new_runs(new, weights, our_training, saves, tmp_path_factory):
    """Function of tp: results of all configurations, without new arguments and with, in the patched checkout."""

    def run(tp):
        cases = grid.absent_cases(tp) + engines.plain_cases(saves(tp)) + grid.width_cases(tp, weights)
        cases += engines.width_cases(weights, our_training[tp][0], saves(tp), tp)
        return _run(new, cases, tp, tmp_path_factory)

    return functools.cache(run)


@pytest.fixture(scope="session")
def plain_runs(plain, new_runs, saves, tmp_path_factory):
    """Function of tp: results of all configurations without new arguments in the plain checkout."""

    def run(tp):
        new_runs(tp)  # its checkpoints are loaded here
        cases = grid.absent_cases(tp) + engines.plain_cases(saves(tp) + " plain") + engines.exchange_cases(saves(tp))
        return _run(plain, cases, tp, tmp_path_factory)

    return functools.cache(run)


def _run(folder, cases, tp, tmp_path_factory):
    return checkouts.run_cases(folder, cases, tp=tp, folder=tmp_path_factory.mktemp("runs"), timeout=400)
