"""NeoXArgs: every argument as an attribute, checked and complete from the moment it exists."""

import copy
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

from megatron.errors import ConfigError
from megatron.geometry import MLPGeometry, padded_vocab_size
from megatron.mixed_geometry import AnyHeadGeometry
from megatron.neox_arguments import command_line, environment, widths
from megatron.neox_arguments.deepspeed_config import deepspeed_config
from megatron.neox_arguments.fields import GROUPS, defaults
from megatron.neox_arguments.inference import INFERENCE_OVERRIDES, without_fp8
from megatron.neox_arguments.layer_attention import LayerAttention, layer_attention
from megatron.neox_arguments.loading import load_files
from megatron.neox_arguments.resolve import resolve


@dataclass(init=False, repr=False)
class NeoXArgs(*GROUPS):
    """All arguments of a run, flat, under GPT-NeoX's names.

    Building one derives what follows from the given values and checks everything; it raises ConfigError with all
    problems found. head_dim, num_kv_heads, softmax_scale and ffn_hidden_size stay as configured (None when absent):
    ask `head_geometry` and `mlp_geometry` for widths.
    """

    def __init__(self, **values: Any):
        process = environment.this_process(values.get("deepspeed_slurm"), values.get("launcher"))
        resolved = resolve(values, world_size=process.world_size if process else None)
        vars(self).update(copy.deepcopy(resolved.values))
        self._given = copy.deepcopy(resolved.given)  # the caller's dicts stay the caller's
        self._resolved = copy.deepcopy(resolved.values)
        self.tokenizer = None

    @classmethod
    def from_dict(cls, values: Dict[str, Any]) -> "NeoXArgs":
        """Build from argument names and values. Raises ConfigError."""
        return cls(**{str(name): value for name, value in values.items()})

    @classmethod
    def from_ymls(
        cls, paths_to_yml_files: Sequence[str], overwrite_values: Optional[Dict[str, Any]] = None
    ) -> "NeoXArgs":
        """Build from YAML or JSON files, merged; overwrite_values win over the files. Raises ConfigError."""
        values, texts = load_files(paths_to_yml_files)
        return cls.from_dict({**values, "config_files": texts, **(overwrite_values or {})})

    @classmethod
    def consume_deepy_args(cls, input_args: Optional[Sequence[str]] = None) -> "NeoXArgs":
        """Build from deepy.py's command line (default: sys.argv), counting the processes to start.

        Raises ConfigError.
        """
        from megatron.neox_arguments.resources import count_processes

        config_paths, overrides = command_line.parse_deepy(input_args)
        values, texts = load_files(config_paths)
        values.update(config_files=texts, **overrides)
        if values.get("global_num_gpus") is None:
            values["global_num_gpus"] = count_processes(values)
        args = cls.from_dict(values)
        if args.use_wandb:  # all ranks of a run share a group, and no two runs do
            args = args.update(wandb_group=command_line.unique_name(args.wandb_group))
        return args

    @classmethod
    def consume_neox_args(
        cls, overwrite_values: Optional[Dict[str, Any]] = None, input_args: Optional[Sequence[str]] = None
    ) -> "NeoXArgs":
        """Build in a process that deepy.py started, from its --megatron_config flag. Raises ConfigError."""
        values = command_line.parse_rank(input_args)
        return cls.from_dict({**values, **(overwrite_values or {})})

    @classmethod
    def consume_inference_args(
        cls, overwrite_values: Optional[Dict[str, Any]] = None, input_args: Optional[Sequence[str]] = None
    ) -> "NeoXArgs":
        """As consume_neox_args, with training's optimizer, activation checkpointing and FP8 off; needs `load`."""
        values = {**command_line.parse_rank(input_args), **INFERENCE_OVERRIDES, **(overwrite_values or {})}
        args = cls.from_dict(without_fp8(values))
        if args.load is None:
            raise ConfigError("load is not set; name the folder of the checkpoint to use")
        return args

    def configure_distributed_args(self) -> None:
        """Set rank, local_rank and world_size from the launcher's environment (torch, MPI or SLURM).

        Raises ConfigError if another number of processes was started than the settings were worked out for.
        """
        if self.deepspeed_mpi and self.master_addr is None:
            environment.discover_mpi(self.master_port)
        process = environment.this_process(self.deepspeed_slurm, self.launcher)
        if process is not None:
            environment.publish(process, self.master_addr, self.master_port)
        self.rank, self.local_rank, self.world_size = process or environment.Process(0, 0, 1)
        if self.world_size != self.global_num_gpus:
            raise ConfigError(
                f"the batch was split for {self.global_num_gpus} processes (global_num_gpus) and {self.world_size} "
                "were started; start with `python deepy.py SCRIPT CONFIG...`, or correct num_gpus or the hostfile"
            )

    def build_tokenizer(self) -> None:
        """Set `tokenizer`, and `padded_vocab_size` unless it was configured. Raises ConfigError or DataError."""
        from megatron.tokenizer import build_tokenizer

        self.tokenizer = build_tokenizer(self)
        self._pad_vocabulary()

    def _pad_vocabulary(self) -> None:
        size = self.tokenizer.vocab_size
        configured = self._given.get("padded_vocab_size")
        if configured is None:
            self.padded_vocab_size = padded_vocab_size(
                size, self.make_vocab_size_divisible_by, self.model_parallel_size
            )
        elif configured < size:
            raise ConfigError(f"padded_vocab_size={configured} is less than the tokenizer's {size} tokens; remove it")

    def head_geometry(self, layer_number: Optional[int] = None) -> AnyHeadGeometry:
        """The attention widths of a layer (0-based); without a number, those that all heads of all layers have.

        Raises ConfigError, without a number, if the heads differ: code that needs one geometry for the model refuses
        such models by asking for it, and has_uniform_heads says so beforehand.
        """
        if layer_number is None:
            return widths.only_head_geometry(self)
        self._check_layer(layer_number)
        return widths.head_geometry(self, layer_number)

    def layers_by_geometry(self) -> Dict[AnyHeadGeometry, List[int]]:
        """Each geometry of the model with the numbers of its layers, in the order of their first layers."""
        return widths.layers_by_geometry(self)

    @property
    def has_uniform_heads(self) -> bool:
        """All heads of all layers have one geometry."""
        return widths.has_uniform_heads(self)

    def mlp_geometry(self, layer_number: int = 0) -> MLPGeometry:
        """The MLP widths of a layer (0-based)."""
        self._check_layer(layer_number)
        return widths.mlp_geometry(self, layer_number)

    def attention_scale(self, layer_number: Optional[int] = None, group: int = 0) -> float:
        """What query-key products of a layer are multiplied by: softmax_scale, or 1/sqrt(head_dim); without a number,
        as in head_geometry. group: see layer_attention."""
        if layer_number is None:
            return self.softmax_scale or self.head_geometry().default_softmax_scale
        return self.layer_attention(layer_number, group).softmax_scale

    def layer_attention(self, layer_number: int = 0, group: int = 0) -> LayerAttention:
        """What attention computes in a layer (0-based): scale, window, soft cap, rotary positions, norms.

        group: of heads, in a layer that has several; scale and rotary positions are each group's own.
        """
        self._check_layer(layer_number)
        return layer_attention(self, layer_number, group)

    @property
    def qkv_has_bias(self) -> bool:
        """The QKV projection has a bias. The output projection has one if use_bias_in_attn_linear."""
        return self.use_bias_in_attn_linear or self.add_qkv_bias

    def _check_layer(self, layer_number: int) -> None:
        if not 0 <= layer_number < self.num_layers:
            raise IndexError(f"layer {layer_number} of a model with num_layers={self.num_layers}")

    @property
    def params_dtype(self):
        """The torch dtype of parameters."""
        import torch

        return {"fp16": torch.float16, "bfloat16": torch.bfloat16, "fp32": torch.float32}[self.precision]

    @property
    def deepspeed_config(self) -> Dict[str, Any]:
        """The config for deepspeed.initialize."""
        return deepspeed_config(self)

    def get_deepspeed_main_args(self) -> List[str]:
        """The argument list for DeepSpeed's launcher."""
        return command_line.runner_args(self)

    def to_dict(self) -> Dict[str, Any]:
        """Name and value of every argument."""
        return {name: getattr(self, name) for name in defaults()}

    def non_default(self) -> Dict[str, Any]:
        """The arguments that differ from their defaults, derived ones included; from_dict of it gives equal args."""
        return {name: getattr(self, name) for name, default in defaults().items() if getattr(self, name) != default}

    def given(self) -> Dict[str, Any]:
        """The arguments as configured, types and spelling normalised, nothing derived."""
        return copy.deepcopy(self._given)

    def update(self, **changes: Any) -> "NeoXArgs":
        """A copy with some configured values changed, derived and checked anew; `self` stays as it is.

        Attributes that were assigned since construction (rank, iteration, ...) are kept. Raises ConfigError.
        """
        assigned = {name: value for name, value in self.to_dict().items() if value != self._resolved[name]}
        if self.tokenizer is not None:
            assigned.pop("padded_vocab_size", None)
        changed = type(self).from_dict({**self._given, **assigned, **changes})
        if self.tokenizer is not None:
            changed.tokenizer = self.tokenizer
            changed._pad_vocabulary()
        return changed

    def print(self, file=None) -> None:
        """Print the arguments that differ from their defaults, on rank 0."""
        if self.rank not in (None, 0):
            return
        shown = {name: value for name, value in self.non_default().items() if name != "config_files"}
        width = max(map(len, shown), default=0)
        for name in sorted(shown):
            print(f"{name:<{width}}  {shown[name]}", file=file or sys.stdout, flush=True)

    def __repr__(self) -> str:
        return f"NeoXArgs({', '.join(f'{name}={value!r}' for name, value in self.non_default().items())})"
