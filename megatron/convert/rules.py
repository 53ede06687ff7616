"""The lines of a weight table, and the table of one model written out."""

from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

from megatron.convert.operations import COPY, Operation
from megatron.convert.widths import LayerWidths
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER

EMBEDDING, LAYER, NORM, HEAD = "embedding", "layer", "norm", "head"
"""Where a parameter of ours is: layer 0, each transformer layer, the final norm, the output layer."""


class Rule(NamedTuple):
    """One of our parameters and the tensors of theirs that it is made of.

    part: EMBEDDING, LAYER, NORM or HEAD. ours: its name inside that layer. theirs: full names with {i} for the number
    of the transformer layer. shapes: of theirs, in the letters of LayerWidths.shape. layers: the numbers of the
    transformer layers that have it, None for all.
    """

    part: str
    ours: str
    theirs: Union[str, Tuple[str, ...]]
    shapes: Union[str, Tuple[str, ...]]
    operation: Operation = COPY
    layers: Optional[Tuple[int, ...]] = None


class Line(NamedTuple):
    """A rule applied to one layer: index as in our checkpoints' file names."""

    index: int
    ours: str
    theirs: Tuple[str, ...]
    shapes: Tuple[Tuple[int, ...], ...]
    operation: Operation
    widths: LayerWidths


def write_out(rules: Iterable[Rule], neox_args, vocabulary: int) -> List[Line]:
    """The table of one model, in the order of our layers. vocabulary: rows of their embedding."""
    rules = list(rules)
    layers = neox_args.num_layers
    outside = LayerWidths.of_layer(neox_args, vocabulary)
    index: Dict[str, int] = {
        EMBEDDING: 0,
        NORM: FIRST_TRANSFORMER_LAYER + layers + 1,
        HEAD: FIRST_TRANSFORMER_LAYER + layers + 2,
    }
    lines = [_line(rule, 0, outside) for rule in rules if rule.part == EMBEDDING]
    for number in range(layers):
        widths = LayerWidths.of_layer(neox_args, vocabulary, number)
        here = [rule for rule in rules if rule.part == LAYER and (rule.layers is None or number in rule.layers)]
        lines += [_line(rule, FIRST_TRANSFORMER_LAYER + number, widths, number) for rule in here]
    for part in (NORM, HEAD):
        lines += [_line(rule, index[part], outside) for rule in rules if rule.part == part]
    return lines


def _line(rule: Rule, index: int, widths: LayerWidths, number: int = 0) -> Line:
    theirs = (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs
    shapes = (rule.shapes,) if isinstance(rule.shapes, str) else rule.shapes
    return Line(
        index,
        rule.ours,
        tuple(name.format(i=number) for name in theirs),
        tuple(widths.shape(letters) for letters in shapes),
        rule.operation,
        widths,
    )
