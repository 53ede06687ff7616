"""A checkpoint read as if it had been saved with Transformer Engine's parts, or without: names, rows and settings."""

import json
from typing import Any, Dict, Iterable, Mapping

from megatron.checkpointing.model_settings import inference_args
from megatron.checkpointing.reader import CheckpointReader, LayerState
from megatron.checkpointing.resharded import FromCheckpoint
from megatron.checkpointing.shards import Shards
from megatron.checkpointing.te_names import (
    SWITCHES,
    Form,
    Share,
    as_native,
    as_te,
    empty_extra_states,
    form_of,
    is_extra_state,
    option,
)
from megatron.errors import CheckpointError, ConfigError, ConversionError
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER
from megatron.neox_arguments.fields import defaults

CHOICES = tuple(SWITCHES)
"""What can be converted. Linear layers have the same weights in both forms, so their settings alone change."""

_FP8 = (
    "te_fp8_mha",
    "te_fp8_format",
    "te_fp8_wgrad",
    "te_fp8_amax_history_len",
    "te_fp8_amax_compute_algo",
    "te_fp8_margin",
)

Settings = Dict[str, Any]


class ConvertedReader(FromCheckpoint):
    """The weights of a CheckpointReader in the form that `target` settings describe, layer by layer, rank by rank.

    neox_args: the model as the checkpoint has it, at the checkpoint's number of ranks.
    """

    def __init__(self, reader: CheckpointReader, neox_args, target: Mapping[str, Any]):
        self.reader = reader
        self.model_parallel_size = reader.model_parallel_size
        self.vocabulary_rows = neox_args.padded_vocab_size
        self.left_out = 0
        """`_extra_state` entries met so far, which are not converted."""
        self._neox_args = neox_args
        self._shards = Shards(neox_args)
        self._target = target
        self._form = form_in(target)
        self._is_rms = neox_args.norm.endswith("rmsnorm")

    def layer_state(self, index: int, tp_rank: int = 0) -> LayerState:
        """{name: tensor} of one layer on one rank, with empty `_extra_state` entries where GPT-NeoX expects them.

        Raises CheckpointError for weights that no model has, or not this one.
        """
        saved = self.reader.layer_state(index, tp_rank)
        self.left_out += sum(map(is_extra_state, saved))
        try:
            for name in saved:
                self._shards.split_of(index, name)
            state = as_te(as_native(saved, self._share(index), self._is_rms), self._share(index), self._form)
        except CheckpointError as error:
            raise CheckpointError(f"{self.reader.folder}, layer {index}, rank {tp_rank}: {error}") from None
        linears = self._target["te_columnparallel"], self._target["te_rowparallel"]
        return {**state, **empty_extra_states(state, *linears)}

    def _share(self, index: int) -> Share:
        """For layers that are no transformer layers too, where no rule asks for it."""
        last = self._neox_args.num_layers - 1
        number = min(max(index - FIRST_TRANSFORMER_LAYER, 0), last)
        heads, mlp = self._neox_args.head_geometry(number), self._neox_args.mlp_geometry(number)
        ranks = self.model_parallel_size
        # Only te_mha moves these rows, and a layer that it can be has one group of heads.
        return Share(heads.shard(ranks), mlp.shard(ranks), heads.groups[0].qkv_layout)


def saved_settings(reader: CheckpointReader, values: Mapping[str, Any]) -> Settings:
    """The settings of Transformer Engine's parts that the checkpoint was saved with: its weights' names tell them.

    Of the linear layers they do not; the config kept in it does, and without one `values`. Which kind of norm it is
    (layernorm, rmsnorm) is taken from values. Raises CheckpointError if a part is mixed.
    """
    form = form_of(name for index in reader.layer_indices() for name in reader.layer_shapes(index))
    kept = reader.config() or values
    norm = wanted_settings(values)["norm"].removeprefix("te_")
    return {
        "te_mha": form.mha,
        "te_layernorm_mlp": form.layernorm_mlp,
        "norm": f"te_{norm}" if form.norms else norm,
        "te_columnparallel": bool(kept.get("te_columnparallel")),
        "te_rowparallel": bool(kept.get("te_rowparallel")),
    }


def wanted_settings(values: Mapping[str, Any]) -> Settings:
    """The same settings as a config has them."""
    return {
        "te_mha": bool(values.get("te_mha") or values.get("te_fp8_mha")),
        "te_layernorm_mlp": bool(values.get("te_layernorm_mlp")),
        "norm": str(values.get("norm") or defaults()["norm"]).lower(),
        "te_columnparallel": bool(values.get("te_columnparallel")),
        "te_rowparallel": bool(values.get("te_rowparallel")),
    }


def form_in(settings: Mapping[str, Any]) -> Form:
    """The form of weights that these settings mean."""
    return Form(settings["te_mha"], settings["te_layernorm_mlp"], settings["norm"].startswith("te_"))


def with_parts(settings: Settings, parts: Iterable[str], to_te: bool) -> Settings:
    """The settings after these parts have become Transformer Engine's, or native."""
    changed = dict(settings)
    for part in parts:
        for name in SWITCHES[part]:
            changed[name] = to_te
    if "norms" in parts:
        norm = settings["norm"].removeprefix("te_")
        changed["norm"] = f"te_{norm}" if to_te else norm
    return changed


def check_target(source: Settings, target: Settings, to_te: bool) -> None:
    """Raises ConversionError if nothing would change, or something in the other direction too."""
    if target == source:
        form = "Transformer Engine's" if to_te else "native"
        raise ConversionError(f"it is {form} already ({described(source)}): there is nothing to convert")
    wrong = [name for name in target if target[name] != source[name] and _is_te(target[name]) != to_te]
    if wrong:
        listed = ", ".join(f"{name}={target[name]}" for name in wrong)
        raise ConversionError(
            f"the config asks for {listed}, which is the other direction; convert these parts on their own, or name "
            f"those of this direction: {' '.join(map(option, CHOICES))}"
        )


def model_args(reader: CheckpointReader, configs, settings: Settings):
    """NeoXArgs of the model with these settings. Raises ConfigError for what such a model cannot be."""
    changes: Settings = dict(settings)
    if settings["te_mha"]:
        changes["attention_config"] = None
    return inference_args(reader, configs, reader.model_parallel_size, changes=changes)


def target_args(reader: CheckpointReader, configs, settings: Settings):
    """As model_args, for the form to be written. Raises ConversionError for what Transformer Engine cannot hold."""
    if settings["norm"] in ("te_scalenorm", "te_non_parametric_layernorm"):
        norm = settings["norm"].removeprefix("te_")
        raise ConversionError(f"norm={norm}: Transformer Engine has layernorm and rmsnorm only; {_CHOOSE}")
    try:
        return model_args(reader, configs, settings)
    except ConfigError as error:
        raise ConversionError(f"the model cannot have that form: {error}\nTo keep a part as it is, {_CHOOSE}") from None


_CHOOSE = f"name the others: {' '.join(map(option, CHOICES))}"


def config_changes(values: Mapping[str, Any], target: Settings) -> Settings:
    """What is to be written in the config of the result, of which `values` are the settings before."""
    changes: Settings = dict(target)
    usual = defaults()
    if target["te_mha"]:
        changes.update(attention_config=None, kv_cache_dtype=None)
    else:
        changes.update({name: usual[name] for name in _FP8})
    return {name: value for name, value in changes.items() if values.get(name, usual[name]) != value}


def described(settings: Mapping[str, Any]) -> str:
    """As the lines of a config."""
    texts = ((name, value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items())
    return ", ".join(f"{name}: {text}" for name, text in texts)


def _is_te(value: Any) -> bool:
    return value is True or str(value).startswith("te_")
