"""A model's files on this machine."""

import os

from megatron.errors import ConversionError

_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def local_folder(name: str) -> str:
    """`name` itself if it is a folder, else the folder of the hub's model of that name, downloaded if need be.

    Raises ConversionError if there is neither.
    """
    if os.path.isdir(name):
        return name
    if os.path.isabs(name) or name.startswith(".") or name.count("/") > 1:
        raise ConversionError(f"{name}: no such folder; name one with a config.json and weights")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=_WANTED)
    except Exception as error:  # of several libraries: no network, no such name, no access
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"{name} is no folder here, and no model of that name could be had: {reason}") from None
