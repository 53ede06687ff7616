"""Names that older GPT-NeoX versions gave to weights, turned into today's.

    mlp.dense_h_to_4h -> mlp.linear1      mlp.dense_4h_to_h -> mlp.linear2
    mlp.w2            -> mlp.linear2      mlp.w3 (up), mlp.w1 (gate) -> mlp.linear1, stacked [up; gate] on each rank

The causal mask and the value put in its place, which were once kept with the weights, are dropped. Transformer Engine's
`_extra_state` (FP8 scaling factors), a BytesIO in GPT-NeoX's files, becomes a tensor of the same bytes.
"""

import io
import re
from typing import Any, Collection, Dict, Iterable, List, Mapping

import torch

from megatron.errors import CheckpointError

_RENAMED = {"mlp.dense_h_to_4h.": "mlp.linear1.", "mlp.dense_4h_to_h.": "mlp.linear2.", "mlp.w2.": "mlp.linear2."}
_OLD_NAME = re.compile(rf"(?:^|(?<=\.))({'|'.join(map(re.escape, _RENAMED))})")
_BRANCH = re.compile(r"(^|.*\.)mlp\.w([13])\.(weight|bias)")
_MASK = re.compile(r"(^|.*\.)attention\.(masked_)?bias")
_FREQUENCIES = "attention.rotary_emb.inv_freq"
_EXTRA_STATE = re.compile(r"(?:.*\.)?_extra_state")

State = Dict[str, torch.Tensor]


def current_names(state: Mapping[str, Any]) -> State:
    """The same weights under today's names; names may have a prefix such as `sequential.2.`.

    One branch of a gated MLP without the other keeps its name, for a comparison with the model to report.
    Raises CheckpointError if an old and a new name give one tensor twice.
    """
    renamed: State = {}
    for name, tensor in state.items():
        if _MASK.fullmatch(name):
            continue
        if is_extra_state(name) and isinstance(tensor, io.BytesIO):
            tensor = _tensor_of_bytes(tensor)
        today = _name_today(name, state)
        branch = _BRANCH.fullmatch(name)
        if branch and _other_branch(branch) in state:
            if branch.group(2) == "1":
                continue
            tensor = torch.cat([tensor, state[_other_branch(branch)]])  # [up; gate]: [2f, h]
        if today in renamed:
            raise CheckpointError(f"the checkpoint holds {today} twice, under an older name ({name}) too")
        renamed[today] = tensor
    return renamed


def names_before(today: str, names: Collection[str]) -> List[str]:
    """Those of the saved names that `current_names` makes the tensor `today` of."""
    return [name for name in names if _name_today(name, names) == today and not _MASK.fullmatch(name)]


def stacks_branches(names: Iterable[str]) -> bool:
    """Whether two of these tensors become one, so that an optimizer's state does not fit the parameters any more."""
    return any(_BRANCH.fullmatch(name) for name in names)


def current_file(contents: Any, keep_frequencies: bool = True) -> Any:
    """`current_names` for what a layer file or an `mp_rank` file holds; any other content is returned as it is.

    keep_frequencies: whether the model has the buffer of rotary frequencies that some versions saved.
    """
    if not isinstance(contents, dict):
        return contents
    if isinstance(contents.get("module"), dict):
        return {**contents, "module": _for_model(contents["module"], keep_frequencies)}
    if contents and all(is_saved_tensor(name, value) for name, value in contents.items()):
        return _for_model(contents, keep_frequencies)
    return contents


def is_unused_buffer(name: str) -> bool:
    """A tensor that some versions saved and that no weight or result depends on: the rotary frequencies."""
    return name.endswith(_FREQUENCIES)


def is_extra_state(name: str) -> bool:
    """Transformer Engine's FP8 scaling factors: no weights, and nothing at all without FP8."""
    return _EXTRA_STATE.fullmatch(name) is not None


def is_saved_tensor(name: Any, value: Any) -> bool:
    """A tensor, or what `current_names` makes one of."""
    return isinstance(value, torch.Tensor) or (isinstance(value, io.BytesIO) and is_extra_state(name))


def _tensor_of_bytes(file: io.BytesIO) -> torch.Tensor:
    contents = bytearray(io.BytesIO.getvalue(file))
    return torch.frombuffer(contents, dtype=torch.uint8) if contents else torch.empty(0, dtype=torch.uint8)


def _for_model(state: State, keep_frequencies: bool) -> State:
    today = current_names(state)
    return today if keep_frequencies else {name: value for name, value in today.items() if not is_unused_buffer(name)}


def _name_today(name: str, names: Collection[str]) -> str:
    branch = _BRANCH.fullmatch(name)
    if branch and _other_branch(branch) in names:
        return f"{branch.group(1)}mlp.linear1.{branch.group(3)}"
    return _OLD_NAME.sub(lambda match: _RENAMED[match.group(1)], name)


def _other_branch(branch: re.Match) -> str:
    prefix, number, kind = branch.groups()
    return f"{prefix}mlp.w{4 - int(number)}.{kind}"
