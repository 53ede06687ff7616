"""Runs a model for generation: its own layers one after the other, a preallocated KV cache, no training engine."""

from typing import List, Optional, Tuple

import torch
import torch.distributed as dist

from megatron import mpu
from megatron.errors import ConfigError
from megatron.model import decoding
from megatron.model.attention.cache import KVCache
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER


class InferenceRunner:
    """One rank's part of a model, ready to produce the logits of the next token.

    model: GPT2ModelPipe or GPT2ModelSequential (or an engine holding one as `.module`); it is put into eval mode.
    With several pipeline stages the hidden states travel by send and receive, and the last stage has the logits.
    """

    def __init__(self, neox_args, model):
        model = model if hasattr(model, "local_layers") else model.module
        model.eval()
        self.neox_args = neox_args
        self.device = mpu.current_device()
        self.layers = model.local_layers()
        self.swap_back = FIRST_TRANSFORMER_LAYER + neox_args.num_layers
        self.stages = _pipeline_ranks()
        self.stage = mpu.get_pipe_parallel_rank()
        self.is_last_stage = self.stage == len(self.stages) - 1
        self.cache: Optional[KVCache] = None
        self._cache_size: Tuple[int, int] = (0, 0)
        self._step = _decoding_step(neox_args, self.layers)
        self._is_watched = False

    @classmethod
    def of(cls, neox_args, model) -> "InferenceRunner":
        """`model` itself if it is a runner already, else a new runner for it."""
        return model if isinstance(model, cls) else cls(neox_args, model)

    @property
    def cache_bytes(self) -> int:
        """Memory of this rank's KV cache; 0 without one."""
        return 0 if self.cache is None else self.cache.nbytes

    def start(self, batch_size: int, max_tokens: int, use_cache: bool = True) -> None:
        """Forget every earlier prompt and make room for `max_tokens` tokens in each of `batch_size` rows.

        A cache that is large enough is kept and emptied, so a list of prompts allocates once.
        Raises ConfigError for settings of the cache when there is to be none.
        """
        check_cache_settings(self.neox_args, use_cache)
        self._is_watched = self._step is not None and self._step.is_watched()
        if not use_cache:
            self.cache, self._cache_size = None, (0, 0)
            return
        rows, room = self._cache_size
        if self.cache is not None and rows == batch_size and room >= max_tokens:
            self.cache.reset()
            return
        self.cache = None  # the old one is freed before the new one is allocated
        self.cache = KVCache(self.neox_args, self._transformer_layers(), batch_size, max_tokens)
        self._cache_size = (batch_size, max_tokens)

    @torch.no_grad()
    def next_token_logits(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> Optional[torch.Tensor]:
        """Feed tokens [b, s] at position_ids [b, s]; logits [b, padded vocabulary] after the last of them.

        All ranks call it together; it returns None except on the last pipeline stage. Without a cache the tokens
        must be the whole sequence so far, with one they follow what was fed since `start`, and more than
        prefill_chunk_size of them are run in pieces.
        """
        length = tokens.shape[1]
        if length == 1 and self._steps():
            return self._step(tokens, position_ids, self.cache)
        size = length if self.cache is None else self.neox_args.prefill_chunk_size or length
        for start in range(0, length, size):
            piece = slice(start, start + size)
            hidden = self._run(tokens[:, piece], position_ids[:, piece], wants_logits=start + size >= length)
        return self._whole_vocabulary(hidden.squeeze(1)) if self.is_last_stage else None

    def _run(self, tokens: torch.Tensor, position_ids: torch.Tensor, wants_logits: bool) -> torch.Tensor:
        """This stage's layers over one piece of the text; only the caches matter when no logits are wanted."""
        layers = self.layers if wants_logits else [layer for layer in self.layers if layer[0] < self.swap_back]
        if not layers:
            return tokens
        hidden = (tokens, position_ids) if self.stage == 0 else self._receive(tokens)
        for index, layer in layers:
            hidden = layer(hidden, **self._cache_argument(index))
            if index == self.swap_back:
                hidden = hidden[:, -1:]  # [b, s, h] -> [b, 1, h]: only the last position needs the head
        next_layer = self.layers[-1][0] + 1
        if not self.is_last_stage and (wants_logits or next_layer < self.swap_back):
            dist.send(hidden.contiguous(), self.stages[self.stage + 1])
        return hidden

    def share_tokens(self, chosen: Optional[torch.Tensor], batch_size: int) -> torch.Tensor:
        """Give every rank the tokens [b] that the drawing rank chose; the others pass None."""
        tokens = torch.empty(batch_size, dtype=torch.int64, device=self.device) if chosen is None else chosen
        if self.is_last_stage and mpu.get_model_parallel_world_size() > 1:
            dist.broadcast(tokens, mpu.get_model_parallel_src_rank(), group=mpu.get_model_parallel_group())
        return self._from_last_stage(tokens)

    def share_logits(self, logits: Optional[torch.Tensor], batch_size: int) -> torch.Tensor:
        """The last stage's logits [b, v] in fp32, on every rank."""
        if logits is None:
            logits = torch.empty(batch_size, self.neox_args.padded_vocab_size, device=self.device)
        return self._from_last_stage(logits.float())

    @property
    def draws(self) -> bool:
        """True on the one rank of a model replica that chooses tokens: the first of the last stage."""
        return self.is_last_stage and mpu.get_model_parallel_rank() == 0

    def _steps(self) -> bool:
        """Whether a single token goes through the step made for it."""
        if self._step is None or self._is_watched or self.cache is None or self.cache.length == 0:
            return False
        return self._step.covers(self.cache.length)

    def _cache_argument(self, index: int) -> dict:
        if self.cache is None or not self._is_transformer_layer(index):
            return {}
        return {"kv_cache": self.cache[index - FIRST_TRANSFORMER_LAYER]}

    def _is_transformer_layer(self, index: int) -> bool:
        return FIRST_TRANSFORMER_LAYER <= index < self.swap_back

    def _transformer_layers(self) -> List[int]:
        return [index - FIRST_TRANSFORMER_LAYER for index, _ in self.layers if self._is_transformer_layer(index)]

    def _receive(self, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden states of the stage before; their shape follows from the first layer here."""
        batch_size, length = tokens.shape
        hidden_size, first = self.neox_args.hidden_size, self.layers[0][0]
        if first < FIRST_TRANSFORMER_LAYER:
            shape = (batch_size, length, hidden_size)
        elif first <= self.swap_back:
            shape = (length, batch_size, hidden_size)
        else:
            shape = (batch_size, 1, hidden_size)
        hidden = torch.empty(shape, dtype=self.neox_args.params_dtype, device=self.device)
        dist.recv(hidden, self.stages[self.stage - 1])
        return hidden

    def _whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """[b, v/p] of each tensor-parallel rank -> [b, v] on all of them."""
        if logits.size(-1) == self.neox_args.padded_vocab_size:
            return logits
        return mpu.gather_from_model_parallel_region(logits)

    def _from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.stages) > 1:
            dist.broadcast(tensor, self.stages[-1], group=mpu.get_pipe_parallel_group())
        return tensor


def _decoding_step(neox_args, layers) -> Optional[decoding.DecodingStep]:
    """None where the layers' own forward passes have to do; compiled for compile=True."""
    if decoding.refusal(neox_args) is not None:
        return None
    return decoding.DecodingStep(neox_args, layers, decoding.compiler(neox_args))


def check_cache_settings(neox_args, use_cache: bool) -> None:
    """Raises ConfigError for settings that only mean something with a KV cache when there is none."""
    if use_cache:
        return
    settings = {name: getattr(neox_args, name) for name in ("kv_cache_dtype", "prefill_chunk_size")}
    problems = [
        f"{name}={value} acts on the key/value cache, and recompute=True generates without one; remove one of the two"
        for name, value in settings.items()
        if value is not None
    ]
    if problems:
        raise ConfigError(problems)


def _pipeline_ranks() -> List[int]:
    """Global ranks of the pipeline this rank is in, first stage first."""
    if mpu.get_pipe_parallel_world_size() == 1:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return dist.get_process_group_ranks(mpu.get_pipe_parallel_group())
