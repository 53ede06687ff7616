"""`head_geometry.json`: the record, in each checkpoint folder, of what the tensors' shapes cannot tell.

8 heads of 16 and 4 heads of 32 have the same projection shapes and are different models. The record is a file of its
own because every key of the `args` in a checkpoint must be known to the program that loads it.
"""

import json
import os
from types import SimpleNamespace
from typing import Any, Dict, List, Optional

import torch
import yaml

from megatron.errors import CheckpointError, ConfigError
from megatron.geometry import HeadGeometry
from megatron.head_dim.config import head_geometry, softmax_scale
from megatron.head_dim.validation import WITHOUT_HEADS

FILE = "head_geometry.json"
VERSION = 1


def write_head_geometry(neox_args, save: str, tag: str) -> None:
    """Rank 0 writes the record into the checkpoint folder save/tag, which is there. Models without heads have none."""
    if not _has_heads(neox_args) or _rank() != 0:
        return
    path = os.path.join(save, tag, FILE)
    with open(path + ".unfinished", "w") as file:
        json.dump(_record(neox_args), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".unfinished", path)


def check_head_geometry(neox_args, load: str, tag: Optional[str] = None) -> None:
    """Compare the geometry of the checkpoint load/tag with the config's, reading no tensor. tag None: the latest one.

    Without a record the YAML text in `configs/` decides; without either, only shapes can. What GPT-NeoX without
    head_dim loads (another rotary_pct, muP or not) is loaded as long as neither side has what is new.
    Raises CheckpointError naming each number that differs, with both values.
    """
    folder = _checkpoint_folder(load, tag)
    if folder is None or not _has_heads(neox_args):
        return
    source, saved = FILE, _read_record(os.path.join(folder, FILE))
    if saved is None:
        source, saved = "configs/", _layers_of_settings(neox_args, folder)
    problems = [] if saved is None else _problems(neox_args, saved)
    if problems:
        listed = "\n".join("  " + problem for problem in problems)
        raise CheckpointError(
            f"{folder} is a model of another head geometry (according to its {source}):\n{listed}\n"
            "Use the settings the checkpoint was made with, or load another checkpoint."
        )


def _record(neox_args) -> Dict[str, Any]:
    return {"version": VERSION, "framework": "GPT-NeoX with head_dim", "layers": _layers(neox_args)}


def _layers(neox_args) -> List[Dict[str, Any]]:
    geometry = head_geometry(neox_args)
    layer = {
        "geometry": geometry.stamp(),
        "softmax_scale": softmax_scale(neox_args),
        "qkv_layout": geometry.qkv_layout.value,
    }
    return [layer] * neox_args.num_layers


def _has_heads(neox_args) -> bool:
    return any(kind not in WITHOUT_HEADS for kind in neox_args.attention_config)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _checkpoint_folder(load: str, tag: Optional[str]) -> Optional[str]:
    """The folder that DeepSpeed will look for; None if no file `latest` names one, which it reports itself."""
    if tag is None:
        latest = os.path.join(load, "latest")
        if not os.path.isfile(latest):
            return None
        with open(latest) as file:
            tag = file.read().strip()
    return os.path.join(load, tag)


def _read_record(path: str) -> Optional[List[Dict[str, Any]]]:
    """The layers of a record; None if there is no such file. Raises CheckpointError if it cannot be read."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path) as file:
            record = json.load(file)
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']}, this program reads {VERSION}")
        for layer in record["layers"]:
            HeadGeometry.from_stamp(layer["geometry"])
        return record["layers"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable geometry record ({error!r})") from None


def _layers_of_settings(neox_args, folder: str) -> Optional[List[Dict[str, Any]]]:
    """The same from the YAML text kept in `configs/`; None if it does not say, or if neither it nor the config has
    head_dim or softmax_scale: GPT-NeoX's own comparison of arguments is enough then."""
    settings = _kept_settings(os.path.join(folder, "configs"))
    saved = SimpleNamespace(
        hidden_size=settings.get("hidden_size"),
        num_attention_heads=settings.get("num_attention_heads"),
        num_kv_heads=settings.get("num_kv_heads"),
        head_dim=settings.get("head_dim"),
        softmax_scale=settings.get("softmax_scale"),
        pos_emb=settings.get("pos_emb", neox_args.pos_emb),
        rotary_pct=settings.get("rotary_pct", 1.0),
        use_mup=settings.get("use_mup", False),
        num_layers=settings.get("num_layers", neox_args.num_layers),
    )
    if saved.hidden_size is None or saved.num_attention_heads is None or not (_is_new(saved) or _is_new(neox_args)):
        return None
    try:
        return _layers(saved)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: the settings in its configs/ do not make a geometry: {error}") from None


def _kept_settings(configs: str) -> Dict[str, Any]:
    """The settings of all files, with underscores in names. A file that is not YAML says nothing."""
    merged: Dict[str, Any] = {}
    for name in sorted(os.listdir(configs)) if os.path.isdir(configs) else []:
        try:
            with open(os.path.join(configs, name)) as file:
                settings = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError):
            continue
        if isinstance(settings, dict):
            merged.update({str(key).replace("-", "_"): value for key, value in settings.items()})
    return merged


def _is_new(neox_args) -> bool:
    return neox_args.head_dim is not None or neox_args.softmax_scale is not None


def _could_be_old(layer: Dict[str, Any]) -> bool:
    """Whether GPT-NeoX makes such a layer without head_dim and softmax_scale; with muP the scale is 1 / head_dim."""
    geometry = HeadGeometry.from_stamp(layer["geometry"])
    scales = (geometry.default_softmax_scale, 1 / geometry.head_dim)
    scale = layer.get("softmax_scale", scales[0])
    return geometry.matches_hidden and any(_close(scale, usual) for usual in scales)


def _problems(neox_args, saved: List[Dict[str, Any]]) -> List[str]:
    wanted = _layers(neox_args)
    if len(saved) != len(wanted):
        return [f"num_layers: {len(saved)} in the checkpoint, {len(wanted)} in the config"]
    as_ever = not _is_new(neox_args) and all(_could_be_old(layer) for layer in saved)
    layers_of: Dict[str, List[int]] = {}
    for number, (theirs, ours) in enumerate(zip(saved, wanted)):
        for problem in _layer_problems(theirs, ours, as_ever):
            layers_of.setdefault(problem, []).append(number)
    return [
        problem if len(layers) == len(saved) else f"{problem} (layers {', '.join(map(str, layers))})"
        for problem, layers in layers_of.items()
    ]


def _layer_problems(saved: Dict[str, Any], wanted: Dict[str, Any], as_ever: bool) -> List[str]:
    """as_ever: leave out what GPT-NeoX never compared, and what may be changed on purpose."""
    problems = [
        f"{key}: {saved['geometry'].get(key)} in the checkpoint, {number} in the config"
        for key, number in wanted["geometry"].items()
        if saved["geometry"].get(key) != number and not (as_ever and key == "rotary_ndims")
    ]
    scale = saved.get("softmax_scale", wanted["softmax_scale"])
    if not problems and not as_ever and not _close(scale, wanted["softmax_scale"]):
        problems.append(f"softmax_scale: {scale} in the checkpoint, {wanted['softmax_scale']} in the config")
    layout = saved.get("qkv_layout", wanted["qkv_layout"])
    if layout != wanted["qkv_layout"]:
        problems.append(f"QKV row order: {layout} in the checkpoint, {wanted['qkv_layout']} here")
    return problems


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * abs(other)
