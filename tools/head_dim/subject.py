"""What a command is asked about: YAML files, a Hugging Face config or a checkpoint, as the arguments of a model."""

import json
import os
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Sequence

from megatron.errors import CheckpointError, ConfigError, ConversionError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.equal_widths import head_dims, one_or_each, one_or_list
from tools.head_dim import configs
from tools.head_dim.configs import CONFIG_JSON


@dataclass(frozen=True)
class Subject:
    """kind: "config", "hf" or "checkpoint". numbers: by the keys of `published`. args: None where no model here can be
    this one, for the reasons in `problems`. notes: what was seen beside."""

    kind: str
    name: str
    numbers: Dict[str, Any]
    args: Optional[NeoXArgs] = None
    problems: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)


def read_subject(paths: Sequence[str]) -> Subject:
    """Read YAML files, one Hugging Face folder or config.json, or one checkpoint folder.

    Raises ConfigError, ConversionError or CheckpointError if it is none of them, or cannot be read.
    """
    folders = [path for path in paths if os.path.isdir(path)]
    if folders and len(paths) > 1:
        raise ConfigError(f"{folders[0]} is a folder: name it alone")
    if folders:
        config = os.path.join(paths[0], CONFIG_JSON)
        if os.path.isfile(config):
            return _of_hf(config, paths[0])
        if not os.listdir(paths[0]):
            raise ConfigError(f"{paths[0]} is empty: neither a {CONFIG_JSON} nor a checkpoint is in it")
        return _of_checkpoint(paths[0])
    if len(paths) == 1 and paths[0].endswith(".json") and "model_type" in read_json(paths[0]):
        return _of_hf(paths[0], paths[0])
    args = configs.load(paths)
    return Subject("config", ", ".join(map(os.path.basename, paths)), numbers_of(args), args)


def numbers_of(args: NeoXArgs) -> Dict[str, Any]:
    """A model's numbers by the keys of published models. vocab_size is the padded one, None if not known yet; head_dim,
    num_kv_heads and partial_rotary are lists, with a number for each layer, where layers differ."""
    rotary = args.pos_emb == "rotary"
    return {
        "hidden_size": args.hidden_size,
        "num_layers": args.num_layers,
        "num_attention_heads": args.num_attention_heads,
        "num_kv_heads": one_or_each(args, lambda geometry: geometry.num_kv_heads),
        "head_dim": one_or_each(args, head_dims),
        "intermediate_size": args.mlp_geometry().ffn_hidden_size,
        "vocab_size": args.padded_vocab_size,
        "rope_theta": _base(args) if rotary else None,
        "partial_rotary": one_or_list(list(_rotated_shares(args))) if rotary else None,
        "tie_embeddings": not args.no_weight_tying,
    }


def _rotated_shares(args: NeoXArgs) -> Iterator[float]:
    """The share of a head that turns with the position, layer by layer."""
    for number in range(args.num_layers):
        rotary = args.layer_attention(number).rotary
        scaling = None if rotary is None else rotary.scaling
        yield args.rotary_pct * (1.0 if scaling is None else scaling.partial_rotary_factor)


def _base(args: NeoXArgs) -> Any:
    """Of the layers with full attention, with rotary_denominator_scale in it."""
    base, scale = args.rotary_emb_base, args.rotary_denominator_scale
    base = base.get("full_attention") if isinstance(base, dict) else base
    return base if base is None or scale is None else base ** (1 / scale)


def _of_hf(config_path: str, name: str) -> Subject:
    from megatron.convert.families import FAMILIES
    from megatron.convert.families.composite import language_model
    from megatron.convert.families.config_file import read_config
    from megatron.convert.model_args import arguments_of

    raw = language_model(read_json(config_path))
    try:
        config = read_config(raw)
        settings = FAMILIES[raw["model_type"]].settings(config)
        args = arguments_of({**settings, "padded_vocab_size": config.vocab_size})
    except (ConversionError, ConfigError) as error:
        problems = [line for problem in error.problems for line in problem.splitlines()]
        return Subject("hf", name, _raw_numbers(raw), problems=problems)
    return Subject("hf", name, numbers_of(args), args)


def _raw_numbers(raw: Dict[str, Any]) -> Dict[str, Any]:
    """What the file itself says, for a model that cannot be held here."""
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    keys = {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "tie_embeddings": "tie_word_embeddings",
    }
    numbers = {ours: text.get(theirs) for ours, theirs in keys.items()}
    if text.get("kv_lora_rank"):  # where head_dim is that of the rotated part alone
        numbers["head_dim"] = (text.get("qk_nope_head_dim") or 0) + (text.get("qk_rope_head_dim") or 0) or None
    for key, others in (("head_dim", "global_head_dim"), ("num_kv_heads", "num_global_key_value_heads")):
        if text.get(others):  # of the layers with full attention
            kinds = text.get("layer_types") or []
            each = [text[others] if kind == "full_attention" else numbers[key] for kind in kinds]
            numbers[key] = one_or_list(each) if each else None
    return numbers


def _of_checkpoint(folder: str) -> Subject:
    from megatron.checkpointing.model_settings import checkpoint_folder, inference_args
    from megatron.checkpointing.reader import CheckpointReader
    from megatron.checkpointing.stamp import STAMP_FILE, check_stamp, read_stamp

    reader = CheckpointReader(checkpoint_folder(folder))
    args = inference_args(reader)
    notes = [] if read_stamp(reader.folder) else [f"no {STAMP_FILE}: the head geometry is that of its configs/"]
    problems = _shape_problems(reader, args)
    try:
        check_stamp(args, reader.folder)
    except CheckpointError as error:
        problems += error.problems
    return Subject("checkpoint", reader.folder, numbers_of(args), args, problems, notes)


def _shape_problems(reader: Any, args: NeoXArgs) -> List[str]:
    """Where the weights of a layer are not those of the settings: the first layer of each geometry is looked at."""
    from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER

    ranks, problems = reader.model_parallel_size, []
    for whole, numbers in args.layers_by_geometry().items():
        if any(
            group.kv_replicas(ranks) > 1 for group in whole.groups
        ):  # each rank's file has a share of a key/value head's rows
            continue
        geometry = whole.shard(ranks)
        wanted = {
            "attention.query_key_value.weight": (geometry.qkv_hidden_size, geometry.hidden_size),
            "attention.dense.weight": (geometry.hidden_size, geometry.query_hidden_size),
        }
        found = reader.layer_shapes(FIRST_TRANSFORMER_LAYER + numbers[0], 0)
        problems += [
            f"layer {numbers[0]}: {name} is {tuple(found[name].shape)} on each rank; its settings make it {shape}"
            for name, shape in wanted.items()
            if name in found and tuple(found[name].shape) != shape
        ]
    return problems


def read_json(path: str) -> Dict[str, Any]:
    """A JSON file that holds a mapping. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            contents = json.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(contents, dict):
        raise ConfigError(f"{path} holds no mapping of settings")
    return contents
