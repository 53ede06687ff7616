"""Self-attention by Transformer Engine, in the place of ParallelSelfAttention (`te_mha`)."""

import contextlib
from functools import partial
from typing import Any, Dict, Optional, Tuple

import torch

from megatron import mpu
from megatron.errors import BackendError, ConfigError
from megatron.geometry import HeadGeometry, QKVLayout
from megatron.model.attention.qkv import pack_qkv, split_qkv
from megatron.model.init_functions import get_init_methods
from megatron.model.norms import get_norm
from megatron.model.rotary import rotary_frequencies
from megatron.model.transformer_engine import api
from megatron.model.transformer_engine.common import no_init, tensor_parallel_arguments
from megatron.model.transformer_engine.extra_state import keep_extra_state_plain
from megatron.model.transformer_engine.inference import TELayerCache
from megatron.neox_arguments.layer_attention import LayerAttention, RotarySettings


class TEMultiheadAttention(api.MultiheadAttention):
    """Causal self-attention with the arguments, the forward contract and the initial function of ParallelSelfAttention.

    Parameters: qkv.{weight, bias} with rows PER_GROUP (for each kv head its q heads, its k, its v), split over the
    ranks by kv heads; proj.weight, columns split; proj.bias, replicated. TE does the softmax in fp32, whatever
    attention_softmax_in_fp32 says, and picks the kernel (its environment variables NVTE_FLASH_ATTN,
    NVTE_FUSED_ATTN, NVTE_UNFUSED_ATTN rule that).

    layer_number is 0-based; the attribute of that name is TE's, 1-based.

    Raises BackendError for what the installed version cannot do. What none can do the config refuses.
    """

    def __init__(
        self,
        neox_args,
        layer_number: int = 0,
        init_method=None,
        output_layer_init_method=None,
        rpe=None,
        parallel_output: bool = False,
    ):
        geometry = neox_args.head_geometry(layer_number)
        function = neox_args.layer_attention(layer_number)
        scale = _scale(function)
        super().__init__(**_arguments(neox_args, layer_number, geometry, function))
        self.geometry, self.function = geometry, function
        self.parallel_output = parallel_output
        if scale != geometry.default_softmax_scale:
            self._replace_core(neox_args, layer_number, scale)
        if neox_args.use_bias_in_attn_linear != neox_args.qkv_has_bias or (parallel_output and self.tp_size > 1):
            self._replace_proj(neox_args)
        default_init, default_output_init = get_init_methods(neox_args)
        self._initialise(neox_args, init_method or default_init, output_layer_init_method or default_output_init)
        self._angles = None if function.rotary is None else rotary_angles(function.rotary)
        # TE forks the random state of this rank's heads for attention dropout, but not under sequence_parallel.
        self._forks = neox_args.sequence_parallel and neox_args.attention_dropout > 0
        keep_extra_state_plain(self)

    def _replace_core(self, neox_args, layer_number: int, scale: float) -> None:
        """MultiheadAttention has no argument for the scale; its core has."""
        self.core_attention = api.DotProductAttention(
            num_attention_heads=self.geometry.num_attention_heads,
            kv_channels=self.geometry.head_dim,
            num_gqa_groups=self.geometry.num_kv_heads,
            attention_dropout=neox_args.attention_dropout,
            qkv_format="sbhd",
            layer_number=layer_number + 1,
            attention_type="self",
            softmax_scale=scale,
            **_parallelism(neox_args),
        )

    def _replace_proj(self, neox_args) -> None:
        """An output projection with a bias setting of its own, or one that leaves the sum over the ranks to others."""
        bias = neox_args.use_bias_in_attn_linear
        common = dict(bias=bias, return_bias=True, init_method=no_init, **_placement(neox_args))
        hidden = self.geometry.hidden_size
        if self.parallel_output:
            width = self.geometry.shard(self.tp_size).query_hidden_size
            self.proj = api.Linear(in_features=width, out_features=hidden, parallel_mode=None, **common)
        else:
            self.proj = api.Linear(
                in_features=self.geometry.query_hidden_size,
                out_features=hidden,
                parallel_mode="row" if self.tp_size > 1 else None,
                **common,
                **_parallelism(neox_args),
            )

    def _initialise(self, neox_args, init_method, output_init_method) -> None:
        """The weights that ParallelSelfAttention draws, its rows in TE's order."""
        geometry = self.geometry
        grouped = partial(_draw_grouped, init_method, geometry)
        shape = (geometry.qkv_hidden_size, geometry.hidden_size)
        _fill(self.qkv.weight, mpu.create_parameter(neox_args, shape, grouped, 0))
        shape = (geometry.hidden_size, geometry.query_hidden_size)
        _fill(self.proj.weight, mpu.create_parameter(neox_args, shape, output_init_method, 1))
        mpu.mark_model_parallel(self.qkv.weight, 0)
        mpu.mark_model_parallel(self.proj.weight, 1)
        if neox_args.qkv_has_bias:
            mpu.mark_model_parallel(self.qkv.bias, 0)

    def forward(
        self, hidden_states: torch.Tensor, kv_cache: Optional[TELayerCache] = None
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """hidden_states [s, b, h] -> (output [s, b, h] without bias, bias [h] or None); see ParallelSelfAttention.

        Raises ConfigError for rotary positions beyond seq_length.
        """
        if kv_cache is None:
            return self._attend(hidden_states, 0, {}), self._bias()
        outputs = []
        rest = hidden_states
        while rest.shape[0]:
            piece, rest = rest[: kv_cache.largest_step], rest[kv_cache.largest_step :]
            offset = kv_cache.length
            outputs.append(self._attend(piece, offset, kv_cache.begin(piece.shape[0], piece.shape[1])))
            kv_cache.end(piece.shape[0])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), self._bias()

    def _attend(self, hidden_states: torch.Tensor, offset: int, step: Dict[str, Any]) -> torch.Tensor:
        tokens = hidden_states.shape[0] * (self.tp_size if self.sequence_parallel else 1)
        angles = self._table(offset + tokens, hidden_states.device)
        forks = self._forks and self.training
        with mpu.get_cuda_rng_tracker().fork() if forks else contextlib.nullcontext():
            output, _ = super().forward(hidden_states=hidden_states, rotary_pos_emb=angles, **step)
        return output

    def _table(self, end: int, device: torch.device) -> Optional[torch.Tensor]:
        """The angles of all positions, from which TE takes those of the step."""
        if self._angles is None:
            return None
        if end > self._angles.shape[0]:
            raise ConfigError(
                f"seq_length={self._angles.shape[0]}: rotary positions reach {end}; raise seq_length or shorten the "
                "input"
            )
        if self._angles.device != device:
            self._angles = self._angles.to(device)
        return self._angles

    def _bias(self) -> Optional[torch.Tensor]:
        """Under sequence_parallel with its gradient's sum over the ranks, which TE leaves to the caller."""
        if not self.proj.use_bias:
            return None
        if self.sequence_parallel and not self.parallel_output:
            return mpu.copy_weight_to_sequence_parallel_region(self.proj.bias)
        return self.proj.bias


def _arguments(neox_args, layer_number: int, geometry: HeadGeometry, function: LayerAttention) -> Dict[str, Any]:
    """The constructor arguments of MultiheadAttention, in every version of it."""
    arguments = dict(
        hidden_size=geometry.hidden_size,
        num_attention_heads=geometry.num_attention_heads,
        kv_channels=geometry.head_dim,
        num_gqa_groups=geometry.num_kv_heads,
        attention_dropout=neox_args.attention_dropout,
        layernorm_epsilon=get_norm(neox_args)[1],
        init_method=no_init,
        output_layer_init_method=no_init,
        layer_number=layer_number + 1,
        attn_mask_type="causal",
        window_size=(-1 if function.window is None else function.window, 0),  # tokens before the query and after it
        set_parallel_mode=mpu.get_model_parallel_world_size() > 1,
        return_bias=True,
        input_layernorm=False,
        fuse_qkv_params=True,
        qkv_weight_interleaved=True,
        bias=neox_args.qkv_has_bias,
        qkv_format="sbhd",
        **_placement(neox_args),
        **_parallelism(neox_args),
    )
    if function.logit_softcap is not None:
        if not api.accepts(api.MultiheadAttention, "softcap"):
            raise BackendError(
                f"attn_logit_softcap={function.logit_softcap}: Transformer Engine {api.VERSION} has no soft cap; set "
                "te_mha: false, or install a version that has"
            )
        arguments["softcap"] = function.logit_softcap
    return arguments


def _parallelism(neox_args) -> Dict[str, Any]:
    ranks = tensor_parallel_arguments()
    return dict(
        sequence_parallel=neox_args.sequence_parallel and ranks["tp_size"] > 1,
        get_rng_state_tracker=mpu.get_cuda_rng_tracker,
        **ranks,
    )


def _placement(neox_args) -> Dict[str, Any]:
    return dict(params_dtype=neox_args.params_dtype, device=mpu.current_device())


def _fill(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def _draw_grouped(init_method, geometry: HeadGeometry, tensor: torch.Tensor, generator=None) -> torch.Tensor:
    """Draw a whole QKV weight as GPT-NeoX's layouts have it, then put its rows in TE's order."""
    init_method(tensor, generator=generator)
    q, k, v = split_qkv(tensor.t(), geometry, geometry.qkv_layout)
    return tensor.copy_(pack_qkv(q, k, v, QKVLayout.PER_GROUP).t())


def _scale(function: LayerAttention) -> float:
    """The softmax scale, and in it the square of yarn's and longrope's factor on cosine and sine.

    TE's rotary table holds angles, so the factor on q and on k goes to the scores. That is the same only where all
    of a head is rotated; the config refuses the rest.
    """
    scaling = None if function.rotary is None else function.rotary.scaling
    return function.softmax_scale * (1.0 if scaling is None else scaling.attention_factor**2)


def rotary_angles(settings: RotarySettings) -> torch.Tensor:
    """TE's rotary table: angles [seq_length, 1, 1, r] in fp32, twice r/2, as TE pairs dimension i with i + r/2 too."""
    inv_freq, _ = rotary_frequencies(settings)
    positions = torch.arange(settings.positions, dtype=torch.float32, device="cpu")
    angles = positions[:, None, None, None] * inv_freq
    return torch.cat([angles, angles], dim=-1)
