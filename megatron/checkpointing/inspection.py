"""What is in a checkpoint, and in what two checkpoints differ. Nothing is built and nothing is written."""

import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from megatron.checkpointing.model_settings import config_paths, inference_args, vocabulary_rows
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.resharded import ReshardedReader
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.stamp import make_stamp
from megatron.checkpointing.weights import Weights
from megatron.errors import NeoXError
from megatron.neox_arguments.equal_widths import by_layer_text, one_or_list

_ABSENT = "absent"


class TensorRow(NamedTuple):
    """One parameter, on the ranks where it has the same shape and dtype."""

    layer: int
    name: str
    shape: Tuple[int, ...]
    dtype: str
    ranks: List[int]


class Difference(NamedTuple):
    """What two checkpoints have at one place. `largest` is the largest absolute difference of values, where both
    have a tensor of one shape there; 0.0 with equal dtypes means that they are equal."""

    where: str
    first: str
    second: str
    largest: Optional[float] = None

    @property
    def differs(self) -> bool:
        """Whether there is anything to report."""
        return self.first != self.second or self.largest not in (None, 0.0)


def tensors(reader: CheckpointReader) -> Iterator[TensorRow]:
    """Every weight, by layer and name; ranks that hold the same shape and dtype share a row."""
    ranks = range(reader.model_parallel_size)
    for layer in reader.layer_indices():
        states = [reader.layer_shapes(layer, rank) for rank in ranks]
        for name in dict.fromkeys(name for state in states for name in state):
            found: Dict[tuple, List[int]] = {}
            for rank in ranks:
                if name in states[rank]:
                    found.setdefault(_kind(states[rank][name]), []).append(rank)
            for (shape, dtype), holders in found.items():
                yield TensorRow(layer, name, shape, dtype, holders)


def summary(reader: CheckpointReader) -> Dict[str, str]:
    """How a checkpoint was saved, as {label: text}."""
    form = "one file per layer" if reader.is_layered else "sequential, one file per rank"
    return {
        "form": "sequential, partitioned (ZeRO 3)" if reader.is_partitioned else form,
        "model_parallel_size": str(reader.model_parallel_size),
        "pipe_parallel_size": str(reader.pipe_parallel_size),
        "iteration": str(reader.iteration),
    }


def settings(reader: CheckpointReader) -> Dict[str, str]:
    """What the model is, as {label: text}: the recorded `args`, and the head geometry."""
    recorded = {f"args.{name}": repr(value) for name, value in reader.args.items() if name != "model_parallel_size"}
    return {**recorded, **geometry(reader)}


def geometry(reader: CheckpointReader) -> Dict[str, str]:
    """The attention widths, from the stamp or else derived from the YAML files kept in the checkpoint.

    A number that is not the same in all layers is given with the layers that have it.
    """
    stamp = reader.stamp()
    if stamp is not None:
        layers, source = stamp["layers"], "the stamp"
    else:
        try:
            layers, source = make_stamp(inference_args(reader))["layers"], "configs/"
        except NeoXError as error:
            return {"geometry": f"unknown: {str(error).splitlines()[0]}"}
    flat = [_numbers(layer) for layer in layers]
    names = dict.fromkeys(name for layer in flat for name in layer)
    texts = {f"geometry.{name}": by_layer_text(one_or_list([layer.get(name) for layer in flat])) for name in names}
    return {"geometry": f"from {source}", **texts}


def _numbers(layer: Dict[str, Any]) -> Dict[str, Any]:
    """A layer's entry in a stamp, flat; where its heads are in groups, a tuple of the groups' numbers."""
    groups = [{**group["geometry"], **group} for group in layer.get("groups") or [layer]]
    names = [name for name in groups[0] if name not in ("version", "geometry", "hidden_size")]
    widths = {name: tuple(group.get(name) for group in groups) for name in names}
    return {
        "hidden_size": groups[0]["hidden_size"],
        **{name: values if len(values) > 1 else values[0] for name, values in widths.items()},
    }


def differences(first: CheckpointReader, second: CheckpointReader) -> Iterator[Difference]:
    """Compare place by place, settings first; equal places are yielded as well (see Difference.differs).

    How the two were saved does not count, and neither do iterations. Weights that are split over different numbers of
    tensor-parallel ranks are compared joined. Raises CheckpointError if that takes a config and none is kept.
    """
    ours, theirs = settings(first), settings(second)
    for label in dict.fromkeys([*ours, *theirs]):
        if not label.startswith("geometry") or (label in ours and label in theirs and label != "geometry"):
            yield Difference(label, ours.get(label, _ABSENT), theirs.get(label, _ABSENT))
    weights = [first, second]
    if first.model_parallel_size != second.model_parallel_size:
        weights = _joined(weights)
    for layer in sorted({*first.layer_indices(), *second.layer_indices()}):
        for rank in range(weights[0].model_parallel_size):
            yield from _layer_differences(layer, rank, *weights)


def attribute(path: str, contents: Any, query: str) -> Any:
    """The value at `a/b/c` in the nested dictionaries and lists of a file. Raises KeyError if it has no such place."""
    value = contents
    for part in query.split("/"):
        if isinstance(value, dict):
            key = part if part in value else next((key for key in value if str(key) == part), None)
            if key is None:
                raise KeyError(f"{os.path.basename(path)} has no {query}")
            value = value[key]
        elif isinstance(value, (list, tuple)) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(f"{os.path.basename(path)} has no {query}")
    return value


def described(value: Any) -> str:
    """One line about a value: tensors by shape, dtype and statistics, containers by size, the rest as it is."""
    if isinstance(value, torch.Tensor):
        text = f"tensor {list(value.shape)} {_dtype(value)}"
        if value.numel() == 0 or value.dtype == torch.bool:
            return text
        wide = value.double()
        return f"{text}, mean {wide.mean():.4g}, L2 norm {wide.norm():.6g}, largest {wide.abs().max():.4g}"
    if isinstance(value, dict):
        return f"{len(value)} entries: {', '.join(map(str, value))}"
    return " ".join(repr(value).split())


def _joined(readers: List[CheckpointReader]) -> List[Weights]:
    """The readers, as if the weights had been saved by one rank."""
    joined = []
    for reader, other in (readers, readers[::-1]):
        try:
            args = inference_args(reader)
        except NeoXError:
            args = inference_args(reader, config_paths(other.folder))
        joined.append(ReshardedReader(reader, Shards(args), 1, vocabulary_rows(reader)))
    return joined


def _layer_differences(layer: int, rank: int, first: Weights, second: Weights) -> Iterator[Difference]:
    ours, theirs = first.layer_state(layer, rank), second.layer_state(layer, rank)
    for name in dict.fromkeys([*ours, *theirs]):
        where = f"layer {layer:02d} rank {rank} {name}"
        kinds = [_text(state[name]) if name in state else _ABSENT for state in (ours, theirs)]
        same_shape = name in ours and name in theirs and ours[name].shape == theirs[name].shape
        yield Difference(where, *kinds, _largest(ours[name], theirs[name]) if same_shape else None)


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Infinity where one has a number and the other has none."""
    if ours.numel() == 0:
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    gap = (ours - theirs).abs()
    gap[(ours == theirs) | (ours.isnan() & theirs.isnan())] = 0.0
    return gap.nan_to_num(nan=float("inf")).max().item()


def _kind(tensor: torch.Tensor) -> Tuple[Tuple[int, ...], str]:
    return tuple(tensor.shape), _dtype(tensor)


def _text(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {_dtype(tensor)}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
