"""Settings with a value for each layer, as attention_config writes them: [[value or [pattern], repeats], ...]."""

from typing import Any, Iterable, List, Optional

MAX_LAYERS = 100_000
"""More than any model has; keeps a slip of the pen from filling the memory with one value for each layer."""


def number_of_layers(num_layers: Optional[int]) -> int:
    """num_layers, kept between 0 and MAX_LAYERS."""
    return min(max(num_layers or 0, 0), MAX_LAYERS)


def expand(config: List[Any], num_layers: Optional[int], cut_off: bool = False) -> List[Any]:
    """One value for each layer.

    An item [value, count] is the value count times; [[value, ...], count] repeats the pattern. The count "all" repeats
    it as often as it fits into the whole model; with cut_off, for a config of that one item, as far as the last layer.
    Items of another shape stand for themselves, so that a plain list has a value for each layer, and what is no value
    reaches the checks of the setting. So does a wrong number of values.
    """
    layers = number_of_layers(num_layers)
    values: List[Any] = []
    for item in config:
        if not _is_run(item):
            values.append(item)
            continue
        value, count = item
        pattern = list(value) if isinstance(value, (list, tuple)) else [value]
        whole, rest = divmod(layers, len(pattern)) if count == "all" else (min(count, MAX_LAYERS), 0)
        values += pattern * whole
        if cut_off and len(config) == 1:
            values += pattern[:rest]
    return values


def _is_run(item: Any) -> bool:
    return (
        isinstance(item, (list, tuple))
        and len(item) == 2
        and item[0] not in ([], ())
        and (item[1] == "all" or type(item[1]) is int)
    )


def count_problem(name: str, values: List[Any], num_layers: int) -> Optional[str]:
    """What to say of a list that is not as long as the model is deep; None if it is."""
    if len(values) == num_layers:
        return None
    layers = "layer" if len(values) == 1 else "layers"
    return f"{name} describes {len(values)} {layers} and num_layers={num_layers}; they must be as many"


def layers_text(numbers: Iterable[int]) -> str:
    """ "layer 3", "layers 0-3, 8" of layer numbers in ascending order."""
    runs: List[List[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    several = len(runs) > 1 or runs[0][0] != runs[0][1]
    spans = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"layer{'s' if several else ''} {', '.join(spans)}"
