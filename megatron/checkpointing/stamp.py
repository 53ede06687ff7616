"""`head_geometry.json`: the record, in each checkpoint folder, of what the tensors' shapes cannot tell.

8 heads of 16 and 4 heads of 32 have the same projection shapes and are different models. The record is a file of its
own because GPT-NeoX compares every key of the `args` it finds in a checkpoint, and does not know head_dim.
"""

import json
import os
from types import SimpleNamespace
from typing import Any, Dict, List, Optional

import yaml

import megatron
from megatron.errors import CheckpointError, ConfigError
from megatron.geometry import HeadGeometry
from megatron.neox_arguments.derive import expand_layer_types
from megatron.neox_arguments.lora import lora_settings
from megatron.neox_arguments.per_layer import layers_text
from megatron.neox_arguments.widths import head_geometry, layers_by_geometry

STAMP_FILE = "head_geometry.json"
FORMAT_VERSION = 1
_STRETCH = "rotary_denominator_scale"


def make_stamp(neox_args) -> Dict[str, Any]:
    """One entry per layer: the geometry, the softmax scale and the row order of the fused QKV weight, and the stretch
    of the rotary frequencies if there is one; for a layer with several groups of heads, `groups` of such entries.
    `lora` describes the adapters, in a model that has them."""
    stamp = {
        "version": FORMAT_VERSION,
        "framework": f"megatron (head_dim) {megatron.__version__}",
        "layers": [_layer_stamp(neox_args, number) for number in range(neox_args.num_layers)],
    }
    adapters = lora_settings(neox_args)
    return stamp if adapters is None else {**stamp, "lora": adapters.stamp()}


def write_stamp(neox_args, folder: str) -> None:
    """Write the record into a checkpoint folder."""
    with open(os.path.join(folder, STAMP_FILE), "w") as file:
        json.dump(make_stamp(neox_args), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_stamp(folder: str) -> Optional[Dict[str, Any]]:
    """The record in a checkpoint folder; None if there is none, as in GPT-NeoX's own checkpoints.

    Raises CheckpointError if it cannot be read.
    """
    path = os.path.join(folder, STAMP_FILE)
    if not os.path.isfile(path):
        return None
    try:
        with open(path) as file:
            stamp = json.load(file)
        if stamp["version"] != FORMAT_VERSION:
            raise ValueError(f"version {stamp['version']}, this program reads {FORMAT_VERSION}")
        for group in (group for layer in stamp["layers"] for group in _groups(layer)):
            HeadGeometry.from_stamp(group["geometry"])
        return stamp
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable geometry record ({error!r})") from None


def check_stamp(neox_args, folder: str) -> None:
    """Compare a checkpoint's head geometry with the config's, reading no tensor.

    Without a record the YAML text that GPT-NeoX keeps in `configs/` decides; without either, only shapes can.
    Raises CheckpointError naming each number that differs, with both values.
    """
    stamp = read_stamp(folder)
    if stamp is not None:
        problems = _stamp_problems(stamp["layers"], make_stamp(neox_args)["layers"])
        source = STAMP_FILE
    else:
        problems = _yaml_problems(neox_args, folder)
        source = "configs/"
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"{folder} is a model of another head geometry (according to its {source}):\n{listed}\n"
            "Use the settings the checkpoint was made with, or load another checkpoint."
        )


def checkpoint_config(folder: str) -> Dict[str, Any]:
    """The settings kept in `configs/`, merged; dashes in names become underscores. Empty if there are none.

    Raises CheckpointError if a file there is not YAML.
    """
    merged: Dict[str, Any] = {}
    configs = os.path.join(folder, "configs")
    for name in sorted(os.listdir(configs)) if os.path.isdir(configs) else []:
        try:
            with open(os.path.join(configs, name)) as file:
                settings = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{os.path.join(configs, name)} is not readable YAML ({error})") from None
        if isinstance(settings, dict):
            merged.update({str(key).replace("-", "_"): value for key, value in settings.items()})
    return merged


def _layer_stamp(neox_args, number: int) -> Dict[str, Any]:
    groups = [
        {
            "geometry": geometry.stamp(),
            "softmax_scale": neox_args.attention_scale(number, group),
            "qkv_layout": geometry.qkv_layout.value,
            **_stretch(neox_args),
        }
        for group, geometry in enumerate(neox_args.head_geometry(number).groups)
    ]
    return {"groups": groups} if len(groups) > 1 else groups[0]


def _groups(layer: dict) -> List[dict]:
    """The entries of a layer's groups of heads: of most layers, the layer's own."""
    return layer["groups"] if "groups" in layer else [layer]


def _stretch(neox_args) -> Dict[str, float]:
    """Only where there is one: records of other models stay what they were."""
    stretch = neox_args.rotary_denominator_scale if neox_args.pos_emb == "rotary" else None
    return {} if stretch in (None, 1.0) else {_STRETCH: stretch}


def _stamp_problems(saved: List[dict], wanted: List[dict]) -> List[str]:
    if len(saved) != len(wanted):
        return [f"num_layers: {len(saved)} in the checkpoint, {len(wanted)} in the config"]
    layers_of: Dict[str, List[int]] = {}
    for number, (theirs, ours) in enumerate(zip(saved, wanted, strict=True)):
        for problem in _layer_problems(theirs, ours):
            layers_of.setdefault(problem, []).append(number)
    return [
        problem if len(layers) == len(saved) else f"{problem} ({layers_text(layers)})"
        for problem, layers in layers_of.items()
    ]


def _layer_problems(saved: dict, wanted: dict) -> List[str]:
    theirs, ours = _groups(saved), _groups(wanted)
    if len(theirs) != len(ours):
        return [f"groups of heads: {_widths(theirs)} in the checkpoint, {_widths(ours)} in the config"]
    return [
        f"group {number} of heads: {problem}" if len(ours) > 1 else problem
        for number, groups in enumerate(zip(theirs, ours, strict=True))
        for problem in _group_problems(*groups)
    ]


def _widths(groups: List[dict]) -> str:
    return " + ".join(f"{each['geometry']['num_attention_heads']} of {each['geometry']['head_dim']}" for each in groups)


def _group_problems(saved: dict, wanted: dict) -> List[str]:
    problems = _differences(saved["geometry"], wanted["geometry"])
    scales = saved.get("softmax_scale"), wanted["softmax_scale"]
    if problems == [] and scales[0] is not None and abs(scales[0] - scales[1]) > 1e-6 * abs(scales[1]):
        problems.append(f"softmax_scale: {scales[0]} in the checkpoint, {scales[1]} in the config")
    if saved.get("qkv_layout", wanted["qkv_layout"]) != wanted["qkv_layout"]:
        problems.append(f"QKV row order: {saved['qkv_layout']} in the checkpoint, {wanted['qkv_layout']} here")
    stretches = saved.get(_STRETCH, 1.0), wanted.get(_STRETCH, 1.0)
    if stretches[0] != stretches[1]:
        problems.append(f"{_STRETCH}: {stretches[0]} in the checkpoint, {stretches[1]} in the config")
    return problems


def _differences(saved: dict, wanted: dict) -> List[str]:
    return [
        f"{key}: {saved.get(key)} in the checkpoint, {wanted.get(key)} in the config"
        for key in {**wanted, **saved}
        if saved.get(key) != wanted.get(key)
    ]


def _yaml_problems(neox_args, folder: str) -> List[str]:
    settings = checkpoint_config(folder)
    if not {"hidden_size", "num_attention_heads"} <= set(settings):
        return []
    ours = {"num_layers": neox_args.num_layers, "pos_emb": neox_args.pos_emb}
    absent = {"num_kv_heads": None, "head_dim": None, "rotary_pct": 1.0, _STRETCH: None, "shared_key_value": False}
    theirs = SimpleNamespace(**{**absent, **ours, **settings})
    has_window = settings.get("sliding_window_width") is not None
    theirs.layer_types = expand_layer_types(settings.get("layer_types"), theirs.num_layers, has_window)
    try:
        layers_by_geometry(theirs)
    except ConfigError as error:
        return [f"its own settings do not make a geometry: {error}"]
    stretch = _stretch(theirs)
    geometries = [head_geometry(theirs, number) for number in range(theirs.num_layers)]
    return _stamp_problems(
        [{"groups": [{"geometry": group.stamp(), **stretch} for group in layer.groups]} for layer in geometries],
        [_layer_stamp(neox_args, number) for number in range(neox_args.num_layers)],
    )
