"""Transformer Engine's `_extra_state` entries in state dicts: FP8 scaling factors, nothing without FP8.

TE keeps them as a BytesIO (1.12) or as the bytes of a pickle (2.x). Neither can be read without running what a file
brings along, so in our state dicts each is a tensor of bytes: of a `torch.save` file of tensors and plain values, or
NOTHING. Entries that TE or GPT-NeoX wrote are read if they need no unpickling. A missing entry counts as NOTHING, so
checkpoints at another number of ranks, or converted ones, need none.
"""

import io
import pickle
import warnings

import torch
from torch import nn

from megatron.model.transformer_engine import api

SUFFIX = "_extra_state"

NOTHING = torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)
"""What every version of TE reads as no state."""


def keep_extra_state_plain(module: nn.Module) -> None:
    """Make the state dicts of `module`, which is or contains TE modules, hold and accept the form above."""
    module.register_state_dict_post_hook(_on_save)
    module.register_load_state_dict_pre_hook(_on_load)


def _on_save(module, state_dict, prefix, local_metadata) -> None:
    for name in _entries(module, prefix):
        if name in state_dict:
            state_dict[name] = _plain(state_dict[name])


def _on_load(module, state_dict, prefix, *_) -> None:
    for name in _entries(module, prefix):
        state_dict[name] = _for_te(state_dict.get(name), name)


def _entries(module: nn.Module, prefix: str):
    """Names of the entries of `module` and the modules in it."""
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}{path}{'.' if path else ''}{SUFFIX}"


def _plain(state) -> torch.Tensor:
    """What TE's own get_extra_state just made, as a tensor of bytes."""
    if isinstance(state, io.BytesIO):
        values = torch.load(io.BytesIO(state.getvalue()), map_location="cpu", weights_only=True)
    elif isinstance(state, torch.Tensor) and not _is_file(state):
        values = pickle.loads(_bytes(state)) if state.numel() else None  # from this process, not from a file
    else:
        return NOTHING.clone() if state is None else state
    if values is None:
        return NOTHING.clone()
    values.pop("recipe", None)  # an object of TE's; the config says it
    file = io.BytesIO()
    torch.save(values, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _for_te(state, name: str):
    """A state dict's entry as this process's TE takes it: None, or a pickle's bytes that we have just made."""
    values = _read(state, name)
    if values is None:
        return None
    if not api.READS_PICKLED_STATE:
        _warn_lost(name, f"Transformer Engine {api.VERSION} takes none")
        return None
    return torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)


def _read(state, name: str):
    try:
        if isinstance(state, io.BytesIO):
            return torch.load(io.BytesIO(state.getvalue()), weights_only=True)
        if state is None or state.numel() == 0 or _bytes(state) == _bytes(NOTHING):
            return None
        if _is_file(state):
            return torch.load(io.BytesIO(_bytes(state)), weights_only=True)
        reason = "it is a pickle"
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
    _warn_lost(name, reason)
    return None


def _warn_lost(name: str, reason: str) -> None:
    warnings.warn(f"{name} of the checkpoint is not read ({reason}); FP8 scaling starts afresh there", stacklevel=2)


def _is_file(state: torch.Tensor) -> bool:
    """torch.save writes zip archives."""
    return _bytes(state[:4]) == b"PK\x03\x04"


def _bytes(state: torch.Tensor) -> bytes:
    return state.detach().cpu().numpy().tobytes()
