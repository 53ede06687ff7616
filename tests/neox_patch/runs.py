"""All runs that the tests and the table compare, each made once, when it is first asked for."""

import functools
from pathlib import Path

from tests.helpers.distributed import run_distributed
from tests.neox_patch import checkouts, engines, grid, ours, truth
from tools.neox_patch.changes import whole_patch
from tools.neox_patch.plan import make_plan

TIMEOUT = 500
"""Seconds for all cases of a checkout; minutes on a machine that does something else, too."""


class Truths:
    """What does not depend on the state of GPT-NeoX. folder: where files are kept."""

    def __init__(self, folder):
        self.folder = Path(folder)

    @functools.cached_property
    def weights(self):
        """{name: (Weights, {tp: checkpoint folder})} of every configuration with the new arguments."""
        return {name: self._weights(number, name) for number, name in enumerate(grid.WIDTHS)}

    def _weights(self, number, name):
        values = grid.WIDTHS[name]
        masters = truth.Weights(grid.arguments(values), grid.VOCABULARY, seed=number)
        config = {key: value for key, value in grid.arguments(values).items() if key != "padded_vocab_size"}
        folders = {tp: str(self.folder / f"weights{number}_tp{tp}") for tp in grid.RANKS if grid.splits(values, tp)}
        for tp, folder in folders.items():
            masters.save(folder, tp=tp, written_config=config)
        return masters, folders

    @functools.cache  # noqa: B019
    def ours(self, tp):
        """{name: [this project's results of each rank]}"""
        cases = {
            n: (grid.arguments(values), self.weights[n][1][tp]) for n, values in grid.runs(grid.WIDTHS, tp).items()
        }
        ranks = self._spawn(tp, ours.results, cases, grid.ids().numpy(), grid.PROMPTS, grid.NEW_TOKENS)
        return {name: [rank[name] for rank in ranks] for name in cases}

    @functools.cache  # noqa: B019
    def our_training(self, tp):
        """[{name: this project's training} of each rank]"""
        files = {name: self.weights[name][1][tp] for name in engines.NAMES}
        return self._spawn(tp, engines.our_training, files, str(self.folder / "our_training"))

    @functools.cached_property
    def transformers(self):
        """{name: transformers' results} of the configurations that it has."""
        names = [name for name, values in grid.WIDTHS.items() if grid.in_transformers(values)]
        arguments = (grid.ids(), grid.PROMPTS, grid.NEW_TOKENS)
        return {name: truth.transformers_results(self.weights[name][0], *arguments) for name in names}

    def _spawn(self, tp, function, *arguments):
        self.folder.mkdir(parents=True, exist_ok=True)
        return run_distributed(tp, function, *arguments, tmp_path=self.folder, timeout=TIMEOUT)


class State:
    """One state of GPT-NeoX, as it is and patched, and what the two compute."""

    def __init__(self, repo, commit, folder, truths):
        self.repo, self.commit, self.folder, self.truths = repo, commit, Path(folder), truths

    @functools.cached_property
    def plain(self):
        """The folder of the state as it is."""
        return checkouts.checkout_at(self.repo, self.commit, self.folder / "plain")

    @functools.cached_property
    def plan(self):
        """What the patch would do to it."""
        return make_plan(self.plain, whole_patch())

    @functools.cached_property
    def new(self):
        """The folder of the state with the patch."""
        return checkouts.patched(checkouts.checkout_at(self.repo, self.commit, self.folder / "patched"), self.plan)

    def saves(self, tp):
        """The folder in which the patched checkout has a checkpoint of each configuration that it trained."""
        return str(self.folder / f"saves tp{tp}")

    @functools.cache  # noqa: B019
    def new_runs(self, tp):
        """{case: [result of each rank]} of all configurations, without new arguments and with, in the patched one."""
        weights, our_saves = self.truths.weights, self.truths.our_training(tp)[0]
        cases = grid.absent_cases(tp) + engines.plain_cases(self.saves(tp)) + grid.width_cases(tp, weights)
        cases += engines.width_cases(weights, our_saves, self.saves(tp), tp)
        cases += grid.wrong_cases({**grid.WRONG, **grid.REFUSED})
        return self._run(self.new, cases, tp)

    @functools.cache  # noqa: B019
    def plain_runs(self, tp):
        """The same of all configurations without new arguments in the plain one."""
        self.new_runs(tp)  # its checkpoints are loaded here
        cases = grid.absent_cases(tp) + engines.plain_cases(self.saves(tp) + " plain")
        cases += engines.exchange_cases(self.saves(tp)) + grid.wrong_cases()
        return self._run(self.plain, cases, tp)

    @functools.cache  # noqa: B019
    def our_reading(self, tp):
        """[{name: (logits, refusal)} of each rank]: this project loads what the patched checkout saved."""
        self.new_runs(tp)
        folders = {name: str(Path(self.saves(tp)) / name) for name in engines.NAMES}
        return run_distributed(tp, engines.our_reading, folders, tmp_path=self.folder, timeout=TIMEOUT)

    def width_names(self, tp):
        """The configurations with new arguments that this state can compute on `tp` ranks."""
        names = list(grid.runs(grid.WIDTHS, tp))
        old = not checkouts.epsilon_is_under_the_root(self.plain)
        return [name for name in names if not (old and name in grid.NOT_UNTIL_2025)]

    def _run(self, checkout, cases, tp):
        return checkouts.run_cases(checkout, cases, tp=tp, folder=self.folder, timeout=TIMEOUT)
