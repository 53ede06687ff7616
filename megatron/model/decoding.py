"""The step that generation repeats: one more token for each row, through all layers, in as few operations as it can.

It computes what the layers' own forward passes compute for a single token with a cache, from the same modules, without
what only training or tensor parallelism needs; tests/unit/test_generation_decoding.py holds the two together. Where it
does not apply, the layers themselves run: see `refusal`.

Compiled, each layer is one call of one compiled function that serves all layers and all tokens.
"""

import functools
import inspect
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

from megatron import mpu
from megatron.initialize import print_rank_0
from megatron.model.attention.cache import AnyLayerCache, KVCache, LayerKVCache, is_te_attention
from megatron.model.attention.core import decode
from megatron.model.attention.heads import HeadGroup
from megatron.model.attention.qkv import split_qkv
from megatron.model.compiling import wants_compile
from megatron.model.few_rows import MOST_ROWS, linear
from megatron.model.norms import RMSNorm
from megatron.model.rotary import rotary_frequencies
from megatron.model.transformer import ParallelTransformerLayer, TiedLogits, soft_cap
from megatron.neox_arguments.layer_attention import RotarySettings


def refusal(neox_args) -> Optional[str]:
    """Why the layers' own forward passes must run instead; None if the step computes the same."""
    if mpu.current_device().type != "cpu":
        return "measured on the CPU only"
    if mpu.get_model_parallel_world_size() > 1 or mpu.get_pipe_parallel_world_size() > 1:
        return "ranks share the model"
    if is_te_attention(neox_args) or neox_args.te_layernorm_mlp or neox_args.te_columnparallel:
        return "layers of Transformer Engine"
    if neox_args.te_rowparallel or neox_args.norm.startswith("te_"):
        return "layers of Transformer Engine"
    if neox_args.pos_emb in ("alibi", "rpe"):
        return f"pos_emb={neox_args.pos_emb} adds a bias to the scores"
    return None


def compiler(neox_args) -> Optional[Callable]:
    """torch.compile for compile=True; None without, and for auto, which does not know how much will be generated."""
    if neox_args.compile is not True or not wants_compile(neox_args):
        return None
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        _say_once("> generation is not compiled: this version of torch cannot keep compiled functions apart; 2.13 can")
        return None
    # torch.compile takes the filter out of the options that it is given.
    return lambda function: torch.compile(function, fullgraph=True, dynamic=False, options=dict(_OPTIONS), **_ISOLATED)


@functools.cache
def _say_once(message: str) -> None:
    print_rank_0(message)


_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # one instruction for product and sum: up to 1.15 x faster
    "realize_reads_threshold": 1,  # a norm is computed once, not again for each row of the weight that it meets
    "size_asserts": False,  # of every weight at every call
    "guard_filter_fn": lambda guards: [_may_change(guard.name) for guard in guards],
}
"""inductor's settings, and what is checked at each call. A kind of layer has a compiled function of its own; checking
all modules of every layer, too, would take as long as a tenth of their work."""


def _may_change(name: str) -> bool:
    """Of what a guard checks: an argument that is not always the same, or a relation of sizes, which has no name."""
    return name.removeprefix("L['").startswith(("x", "cache", "place")) or not name


_ISOLATED = dict(isolate_recompiles=True, recompile_limit=4 * MOST_ROWS)
"""Functions of different kinds and models know nothing of each other. A number of rows is a compilation."""


class Place(NamedTuple):
    """Where a layer puts the token, and the angles by which it turns it; layers of one kind share it."""

    slot: torch.Tensor
    """int64 [1], in the cache."""
    seen: torch.Tensor
    """Empty [t, 0]; t is how many tokens the query sees. A size, so that it may change under a compiled function."""
    cos: Optional[torch.Tensor]
    """[r] in the model's dtype; None without rotary positions."""
    sin: Optional[torch.Tensor]
    """[r], the first half negated."""


Places = Tuple[Place, ...]
"""Of a layer's groups of heads: most have one."""


class DecodingStep:
    """(tokens [b, 1], position_ids [b, 1], cache) -> logits [b, v]. `layers`: all of a model's, see local_layers.

    compiler: what compiles a function, None to run it as it is.
    """

    def __init__(self, neox_args, layers: List[Tuple[int, Callable]], compiler: Optional[Callable] = None):
        modules = [layer for _, layer in layers]
        self._embedding, self._norm, self._head = modules[0], modules[-2].norm, _head(modules[-1])
        self._layers = [layer for layer in modules if isinstance(layer, ParallelTransformerLayer)]
        self._angles = _Angles(neox_args.params_dtype)
        self._prepared: Optional[KVCache] = None
        self._is_compiled = compiler is not None
        self._run = [_layer] * len(self._layers), _logits
        if compiler is not None:
            by_kind = {kind: compiler(_layer) for kind in map(_kind, self._layers)}
            self._run_compiled = [by_kind[_kind(layer)] for layer in self._layers], compiler(_logits)

    def covers(self, position: int) -> bool:
        """Whether a token at this position, of a text that is cached, is turned as the cached ones were."""
        settings = {heads.function.rotary for layer in self._layers for heads in layer.attention.head_groups} - {None}
        return all(position < each.positions and not _crosses(each, position) for each in settings)

    def is_watched(self) -> bool:
        """Whether a hook waits for what some module gives: hooks see the layers' own forward passes only."""
        modules = (module for layer in (*self._layers, self._norm) for module in layer.modules())
        return any(module._forward_hooks or module._forward_pre_hooks for module in modules)

    def __call__(self, tokens: torch.Tensor, position_ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        hidden = self._embedding((tokens, position_ids))  # [b, 1, h]
        hidden = hidden.view(1, *hidden.shape[::2])  # [1, b, h], as every layer returns it, strides included
        run_layers, run_head = self._functions(cache, rows=len(tokens))
        for layer, run, place in zip(self._layers, run_layers, self._places(cache), strict=True):
            hidden = run(layer, hidden, cache[layer.layer_number], place)
        return run_head(self._norm, hidden, *self._head)[0]

    def _functions(self, cache: KVCache, rows: int) -> Tuple[List[Callable], Callable]:
        """(one for each layer, the head's). With many rows there is little to win, and each number would compile."""
        if not self._is_compiled or rows > MOST_ROWS:
            return self._run
        _say_once("> compiling the step that generates a token: up to 20 s, cached for the next run")
        if cache is not self._prepared:
            for layer in self._layers:
                for part in cache[layer.layer_number].parts:
                    _mark_dynamic(part)  # longer texts have larger caches, which are no reason to compile again
            self._prepared = cache
        return self._run_compiled

    def _places(self, cache: KVCache) -> List[Places]:
        """By layer. The caches have room for the token then."""
        position, made = cache.length, {}
        places = []
        for layer in self._layers:
            parts = zip(layer.attention.head_groups, cache[layer.layer_number].groups, strict=True)
            keys = [(*part.advance(), heads.function.rotary) for heads, part in parts]
            for slot, stored, rotary in keys:
                if (slot, stored, rotary) not in made:
                    angles = self._angles.at(rotary, position)
                    made[slot, stored, rotary] = Place(torch.tensor([slot]), self._size(stored), *angles)
            places.append(tuple(made[key] for key in keys))
        return places

    def _size(self, stored: int) -> torch.Tensor:
        size = torch.empty(stored, 0)
        if self._is_compiled:
            _mark_dynamic(size)
        return size


def _mark_dynamic(tensor: torch.Tensor) -> None:
    """The first size may change under a compiled function, but for 1, which is always a case of its own."""
    if len(tensor) > 1:
        torch._dynamo.mark_dynamic(tensor, 0)


def _layer(layer: ParallelTransformerLayer, x: torch.Tensor, cache: AnyLayerCache, places: Places) -> torch.Tensor:
    """One layer in its residual form, x [1, b, h] -> [1, b, h]: see ParallelTransformerLayer."""
    attention_input = _normed(layer.input_layernorm, x)
    attended = _attention(layer.attention, attention_input, cache, places)
    if layer.gpt_j_residual:
        mlp_input = attention_input if layer.gpt_j_tied else _normed(layer.post_attention_layernorm, x)
        return layer.scaled(x + (attended + _mlp(layer.mlp, mlp_input)))
    x = x + _normed(layer.attention_output_layernorm, attended)
    x = x + _normed(layer.mlp_output_layernorm, _mlp(layer.mlp, _normed(layer.post_attention_layernorm, x)))
    return layer.scaled(x)


def _attention(attention, x: torch.Tensor, cache: AnyLayerCache, places: Places) -> torch.Tensor:
    rows = _linear(attention.query_key_value, x)  # [1, b, (n + 2m)·d]
    if attention.groups is None:
        context = _context(attention, rows, cache, places[0])
    else:
        parts = zip(attention.groups, rows.split(attention.rows_of_groups(), dim=-1), cache.groups, places, strict=True)
        context = torch.cat([_context(*part) for part in parts], dim=-1)
    return _linear(attention.dense, context)  # [1, b, n·d] -> [1, b, h]


def _context(heads: HeadGroup, rows: torch.Tensor, cache: LayerKVCache, place: Place) -> torch.Tensor:
    q, k, v = split_qkv(rows, heads.partition, heads.geometry.qkv_layout)
    v = _normed(heads.v_norm, v)
    q, k = _turned(*_qk_normed(heads, q, k), place)
    k, v = cache.put(k, v, place.slot, place.seen.shape[0])  # [t, b, m, d]
    function = heads.function
    return decode.attend(q, k, v, scale=function.softmax_scale, softcap=function.logit_softcap).flatten(2)


def _mlp(mlp, x: torch.Tensor) -> torch.Tensor:
    branches = _linear(mlp.linear1, x)  # [1, b, f or 2f]
    return _linear(mlp.linear2, mlp.activation_func(branches))  # [1, b, h]


def _linear(module, x: torch.Tensor) -> torch.Tensor:
    output = linear(x, module.weight, module.bias)
    return output if module.lora is None else output + module.lora(x)


def _turned(q: torch.Tensor, k: torch.Tensor, place: Place) -> Tuple[torch.Tensor, torch.Tensor]:
    """rotary.rotate of both at once, [1, b, n, d] and [1, b, m', d]: x * cos + (halves of x swapped) * (-sin, sin)."""
    if place.cos is None:
        return q, k
    heads, ndims = torch.cat([q, k], dim=2), place.cos.shape[0]
    turned, rest = heads[..., :ndims], heads[..., ndims:]
    swapped = turned.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    turned = torch.addcmul(turned * place.cos, swapped, place.sin)
    heads = torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
    return heads.split([q.shape[2], k.shape[2]], dim=2)


def _kind(layer: ParallelTransformerLayer):
    """Layers of one kind differ in nothing but their weights."""
    heads = tuple((heads.function, heads.geometry) for heads in layer.attention.head_groups)
    return heads, layer.mlp.linear1.weight.shape


def _logits(norm, x: torch.Tensor, weight, bias, softcap: Optional[float]) -> torch.Tensor:
    return soft_cap(linear(_normed(norm, x), weight, bias), softcap)  # [1, b, h] -> [1, b, v]


def _qk_normed(heads: HeadGroup, q: torch.Tensor, k: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    if heads.function.qk_norm == "per_head":
        return _normed(heads.q_layernorm, q), _normed(heads.k_layernorm, k)
    return heads._normalise(q, k)


def _normed(norm: Optional[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
    """A module's norm; of the most common one torch's function has fewer operations, and the compiler better ones."""
    if norm is None:
        return x
    if type(norm) is RMSNorm and not norm.zero_centered and not torch.compiler.is_compiling():
        return F.rms_norm(x, norm.shape, norm.scale, norm.eps)
    return norm(x)


def _head(head: Callable) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[float]]:
    """(weight, bias, softcap) of either output layer."""
    if isinstance(head, partial) and isinstance(head.func, TiedLogits):
        return head.args[0].word_embeddings_weight, None, head.func.softcap
    return head.final_linear.weight, head.final_linear.bias, head.softcap


class _Angles:
    """Cosines and sines of one position, as the tables of rotary.py have them."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._frequencies: Dict = {}

    def at(self, settings: Optional[RotarySettings], position: int):
        """(cos [r], sin [r] with the first half negated), or (None, None) without rotary positions."""
        if settings is None:
            return None, None
        inv_freq, factor = self._of_length(settings, position + 1)
        angles = torch.tensor(float(position)) * inv_freq
        cos, sin = (table.mul(factor).to(self._dtype) for table in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos]), torch.cat([-sin, sin])

    def _of_length(self, settings: RotarySettings, length: int):
        """rotary_frequencies, kept for as long as the length of the text does not change them."""
        threshold = None if settings.scaling is None else settings.scaling.length_threshold
        beyond = threshold is not None and length > threshold
        kept = (settings, beyond)
        if kept not in self._frequencies or (beyond and settings.scaling.rope_type == "dynamic"):
            self._frequencies[kept] = rotary_frequencies(settings, length)
        return self._frequencies[kept]


def _crosses(settings: RotarySettings, position: int) -> bool:
    """Whether the text gets, with this token, longer than longrope turns its keys in one way."""
    scaling = settings.scaling
    return scaling is not None and scaling.rope_type == "longrope" and position == scaling.length_threshold
