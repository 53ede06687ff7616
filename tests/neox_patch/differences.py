"""How far apart what a patched checkout computes is from what it is compared with, in numbers."""

from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from tests.neox_patch import engines, grid, runs
from tests.neox_patch.test_engines import LOGITS, LOSSES
from tests.neox_patch.test_widths import OURS, THEIRS

NONE = "–"


class Kind(NamedTuple):
    """A row of the first table. measure: of a state at a number of ranks; allowed: the most."""

    name: str
    measure: Callable[[runs.State, int], float]
    allowed: float


class Cell(NamedTuple):
    """Largest differences of one configuration; None where there is nothing to compare with."""

    ours: Optional[float]
    gradients: Optional[float]
    transformers: Optional[float]

    @property
    def text(self) -> str:
        """As it stands in the table."""
        return " / ".join(NONE if value is None else number(value) for value in self)

    @property
    def allowed(self) -> bool:
        """Whether each difference is small enough."""
        pairs = zip(self, (OURS, OURS, THEIRS), strict=True)
        return all(value is None or value <= most for value, most in pairs)


def number(value: float) -> str:
    """A difference; 0 only if there is none."""
    return "0" if value == 0 else f"{value:.0e}"


def apart(one, other) -> float:
    """Largest absolute difference of two tensors or arrays. Raises ValueError if they have other shapes."""
    one, other = (torch.as_tensor(each).double() for each in (one, other))
    if one.shape != other.shape:
        raise ValueError(f"shapes {tuple(one.shape)} and {tuple(other.shape)}")
    return (one - other).abs().max().item()


def ranks_of(results: Dict, case: str) -> List[Dict]:
    """The results of each rank. Raises RuntimeError if the case failed there."""
    for result in results[case]:
        if "error" in result:
            raise RuntimeError(f"{case}: {result['traceback']}")
    return results[case]


def _without(state: runs.State, tp: int) -> float:
    """Logits, loss, weights and gradients without new arguments, patched and plain; other names are a failure."""
    return max(
        _same(old, new)
        for name in grid.runs(grid.ABSENT, tp)
        for old, new in zip(
            ranks_of(state.plain_runs(tp), f"absent: {name}"),
            ranks_of(state.new_runs(tp), f"absent: {name}"),
            strict=True,
        )
    )


def _same(old: Dict, new: Dict) -> float:
    if old["shapes"] != new["shapes"] or old.get("cached") != new.get("cached"):
        return float("inf")
    pairs = [(old["logits"], new["logits"]), (torch.tensor(old["loss"]), torch.tensor(new["loss"]))]
    pairs += [(old[key][name], new[key][name]) for key in ("state", "grads") for name in old[key]]
    return max(apart(*pair) for pair in pairs)


def _trained_as_before(state: runs.State, tp: int) -> float:
    return _losses(state, tp, [(state.plain_runs(tp), f"trains: {name}") for name in engines.PLAIN])


def _losses(state: runs.State, tp: int, before: Sequence[Tuple[Dict, str]]) -> float:
    return max(
        apart(torch.tensor(old["losses"]), torch.tensor(new["losses"]))
        for results, case in before
        for old, new in zip(ranks_of(results, case), ranks_of(state.new_runs(tp), case), strict=True)
    )


def _plain_resumes(state: runs.State, tp: int) -> float:
    return max(
        apart(old["logits"], new["logits"])
        for name in engines.PLAIN
        for old, new in zip(
            ranks_of(state.plain_runs(tp), f"loads: {name}"),
            ranks_of(state.new_runs(tp), f"trains: {name}"),
            strict=True,
        )
    )


def _with_ours(case: str, key: str, our_key: str) -> Callable[[runs.State, int], float]:
    """Compares what the patched checkout's engine gave with what this project's gave."""

    def measure(state: runs.State, tp: int) -> float:
        return max(
            apart(torch.as_tensor(new[key]), torch.as_tensor(our[name][our_key]))
            for name in engines.NAMES
            for new, our in zip(
                ranks_of(state.new_runs(tp), f"{case}: {name}"), state.truths.our_training(tp), strict=True
            )
        )

    return measure


def _we_load(state: runs.State, tp: int) -> float:
    return max(
        apart(logits, ranks_of(state.new_runs(tp), f"trains: {name}")[rank]["logits"])
        for rank, read in enumerate(state.our_reading(tp))
        for name, (logits, _) in read.items()
    )


KINDS = (
    Kind(f"without new arguments, {len(grid.ABSENT)} models: patched and plain", _without, 0.0),
    Kind(f"the same, losses of {engines.STEPS} optimizer steps", _trained_as_before, 0.0),
    Kind("the same, the patched one's checkpoint loaded by the plain one: logits", _plain_resumes, 0.0),
    Kind(
        f"losses of {engines.STEPS} steps, this project's and the patched one's",
        _with_ours("trains", "losses", "losses"),
        LOSSES,
    ),
    Kind("logits after them", _with_ours("trains", "logits", "logits"), LOGITS[torch.float32]),
    Kind(
        "this project's checkpoint loaded by the patched one: logits", _with_ours("resumes", "logits", "logits"), OURS
    ),
    Kind("and trained on: losses", _with_ours("resumes", "losses", "losses after"), LOSSES),
    Kind("the patched one's checkpoint loaded by this project: logits", _we_load, OURS),
)


def kinds(state: runs.State) -> Iterator[Tuple[str, float, bool]]:
    """(name, largest difference, allowed) of each row of the first table."""
    for kind in KINDS:
        value = max(kind.measure(state, tp) for tp in grid.RANKS)
        yield kind.name, value, value <= kind.allowed


def cells(state: runs.State) -> Dict[str, Cell]:
    """{configuration: Cell}; those that this state cannot compute are not there."""
    found: Dict[str, List[Cell]] = {}
    for tp in grid.RANKS:
        for name in state.width_names(tp):
            found.setdefault(name, []).append(_cell(state, tp, name))
    return {name: Cell(*map(_largest, zip(*cells_, strict=True))) for name, cells_ in found.items()}


def _largest(values: Sequence[Optional[float]]) -> Optional[float]:
    present = [value for value in values if value is not None]
    return max(present) if present else None


def _cell(state: runs.State, tp: int, name: str) -> Cell:
    ranks, ours = ranks_of(state.new_runs(tp), f"width: {name}"), state.truths.ours(tp)[name]
    theirs = state.truths.transformers.get(name)
    pairs = list(zip(ranks, ours, strict=True))
    return Cell(
        max(apart(new["logits"], our["logits"]) for new, our in pairs),
        max(apart(new["grads"][key], our["grads"][key]) for new, our in pairs for key in our["grads"]),
        None if theirs is None else max(apart(new["logits"], theirs["logits"]) for new in ranks),
    )
