"""How many processes a launch will start."""

import ctypes
import os
import sys
import warnings
from typing import Any, Dict, Mapping, Optional

from megatron.errors import ConfigError
from megatron.neox_arguments.fields import defaults
from megatron.neox_arguments.types import check

DEFAULT_HOSTFILE = "/job/hostfile"
_READ = "hostfile include exclude num_nodes num_gpus pipe_parallel_size model_parallel_size".split()


def hostfile_path(configured: Optional[str]) -> Optional[str]:
    """The hostfile in use: the configured one, $DLTS_HOSTFILE, or /job/hostfile where it exists.

    None means this machine alone, also where the configured file does not exist: GPT-NeoX and DeepSpeed run there
    then, and GPT-NeoX's own configurations name one that is not there.

    Raises ConfigError if the file that the environment names does not exist.
    """
    if configured:
        return configured if os.path.isfile(configured) else None
    named = os.environ.get("DLTS_HOSTFILE")
    if named and not os.path.isfile(named):
        raise ConfigError(f"$DLTS_HOSTFILE={named}: no such file")
    return named or (DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None)


def count_processes(values: Mapping[str, Any]) -> Optional[int]:
    """Processes that DeepSpeed's launcher will start for these argument values, not yet checked.

    With a hostfile: its slots after include, exclude, num_nodes and num_gpus. Otherwise this machine's GPUs, filtered
    alike. Without GPUs: num_gpus processes, or as many as one copy of the model needs. None if a value is of a wrong
    type, which building NeoXArgs will report.

    Raises ConfigError if the hostfile is faulty or asks for devices that are not there.
    """
    settings = _checked(values)
    if settings is None:
        return None
    if settings["include"] and settings["exclude"]:
        return None  # also reported by the validation
    path = hostfile_path(settings["hostfile"])
    if path is not None:
        return _count_slots(_read_hosts(path), settings, path)
    if settings["num_nodes"] > 1:
        raise ConfigError(f"num_nodes={settings['num_nodes']} needs a hostfile that names the machines")
    if settings["hostfile"]:
        warnings.warn(f"hostfile={settings['hostfile']}: no such file; using this machine alone", stacklevel=2)
    gpus = count_gpus()
    if gpus:
        return _count_slots({"localhost": gpus}, settings, "this machine")
    if settings["include"] or settings["exclude"]:
        raise ConfigError("include and exclude choose GPUs, and this machine has none; use num_gpus")
    model = max(settings["pipe_parallel_size"], 1) * max(settings["model_parallel_size"], 1)
    return settings["num_gpus"] or model


def count_gpus() -> int:
    """CUDA devices that this process may use; 0 when DS_ACCELERATOR asks for the CPU."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not _has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def _has_gpu_driver() -> bool:
    """False where torch cannot find a GPU; asking this takes no import of torch, which takes seconds."""
    if not sys.platform.startswith("linux") or os.path.exists("/dev/kfd"):  # kfd: AMD's driver
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # NVIDIA's driver; CUDA's own libraries load it by this name
    except OSError:
        return False
    return True


def _checked(values: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    from megatron.neox_arguments.resolve import annotations

    standard = defaults()
    settings = {}
    for name in _READ:
        value, problem = check(name, values.get(name), annotations()[name])
        if problem:
            return None
        settings[name] = standard[name] if value is None else value
    return settings


def _read_hosts(path: str) -> Dict[str, int]:
    from deepspeed.launcher.runner import fetch_hostfile

    try:
        return fetch_hostfile(path)
    except ValueError as error:
        raise ConfigError(f"hostfile={path}: {error}") from None


def _count_slots(hosts: Mapping[str, int], settings: Mapping[str, Any], where: str) -> int:
    include, exclude, num_gpus = settings["include"] or "", settings["exclude"] or "", settings["num_gpus"]
    if include or exclude:
        from deepspeed.launcher.runner import parse_inclusion_exclusion

        try:
            slots = [len(found) for found in parse_inclusion_exclusion(hosts, include, exclude).values()]
        except ValueError as error:
            name, value = ("include", include) if include else ("exclude", exclude)
            raise ConfigError(f"{name}={value}: {error}") from None
    else:
        slots = list(hosts.values())
        slots = slots[: settings["num_nodes"]] if settings["num_nodes"] > 0 else slots
        if num_gpus and num_gpus > min(slots):
            raise ConfigError(f"num_gpus={num_gpus} is more than the {min(slots)} that {where} offers")
        slots = [num_gpus] * len(slots) if num_gpus else slots
    if not sum(slots):
        raise ConfigError(f"no device is left after include={include!r} and exclude={exclude!r}")
    return sum(slots)
