"""Generation as workers: ours in every form and transformers', on the same weights.

A step generates once in every precision and batch size and says, for each line "PRECISION, batch N: NAME", the seconds
of a token after the first, of the prompt, the tokens, the bytes that a token reads and those of the cache. The first
step, which compiles, generates few tokens.
"""

import time
from typing import Any, Callable, Dict, List

import torch

from tools.bench.peers import causal_lm
from tools.bench.workers import Figures

PROMPT, FIRST = 64, 4
NO_END = -1
PEER, EAGER, COMPILED = "transformers", "ours", "ours, compiled"
CACHES = {f"ours, compiled, {name} cache": kind for name, kind in (("int8", "int8"), ("fp8", "fp8_e4m3"))}
"""kv_cache_dtype by line; with bfloat16 and the largest batch only."""
OWN_KEYS = ("precisions", "batches", "new_tokens")
"""Of the settings, those that are not the model's."""

Generate = Callable[[int], Figures]
"""new tokens -> figures"""


def transformers(given: Dict[str, Any]) -> Callable[[], Figures]:
    """A worker: generate of transformers with its dynamic cache."""
    lines: Dict[str, Generate] = {}
    for precision in given["precisions"]:
        model = causal_lm({**given, "precision": precision}).eval()
        for batch in given["batches"]:
            lines[f"{precision}, batch {batch}: {PEER}"] = _theirs(given, precision, model, batch)
    return _step(lines, given)


def ours(given: Dict[str, Any]) -> Callable[[], Figures]:
    """A worker: our generation in every form. The uncompiled one says with the largest batch how long a prompt of the
    whole context takes (prefill), and the model's forward pass over it (forward)."""
    lines: Dict[str, Generate] = {}
    for precision in given["precisions"]:
        args = _arguments(given, precision)
        model = _twin({**given, "precision": precision}, args)
        for batch in given["batches"]:
            forms = {EAGER: {}, COMPILED: dict(compile=True)}
            if precision == "bfloat16" and batch == max(given["batches"]):
                forms.update({name: dict(compile=True, kv_cache_dtype=kind) for name, kind in CACHES.items()})
            for name, changes in forms.items():
                lines[f"{precision}, batch {batch}: {name}"] = _ours(given, args.update(**changes), model, batch)
    return _step(lines, given)


def _step(lines: Dict[str, Generate], given: Dict[str, Any]) -> Callable[[], Figures]:
    lengths = [given["new_tokens"], FIRST]

    def step() -> Figures:
        new = lengths.pop() if len(lengths) > 1 else lengths[0]
        return {line: generate(new) for line, generate in lines.items()}

    return step


class _Times(list):
    """What transformers' `generate` calls a streamer: told the prompt, then each token."""

    def put(self, value: torch.Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None:
        pass


def _theirs(given: Dict[str, Any], precision: str, model, batch: int) -> Generate:
    args, ids = _arguments(given, precision), prompts(given, batch)

    def generate(new: int) -> Figures:
        times, start = _Times(), time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0, streamer=times,
        )  # fmt: skip
        return _figures(args, [start, *times[1:]], out[:, PROMPT:])

    return generate


def _ours(given: Dict[str, Any], args, model, batch: int) -> Generate:
    from megatron.text_generation import InferenceRunner, stream_tokens

    runner, texts = InferenceRunner(args, model), prompts(given, batch).tolist()

    def generate(new: int) -> Figures:
        times = [time.perf_counter()]
        for state in stream_tokens(args, runner, texts, eos_token_id=NO_END, maximum_tokens=new):
            times.append(time.perf_counter())
            tokens = state.tokens[:, PROMPT : PROMPT + new]
        result = _figures(args, times, tokens)
        if args.compile or batch < max(given["batches"]):
            return result
        return {**result, **_prefill(given, args, model, runner, batch)}

    return generate


def _prefill(given: Dict[str, Any], args, model, runner, batch: int) -> Figures:
    tokens = prompts(given, batch, args.seq_length - 1)
    positions = torch.arange(tokens.shape[1]).expand(batch, -1)
    runner.start(batch, tokens.shape[1])
    start = time.perf_counter()
    runner.next_token_logits(tokens, positions)
    between = time.perf_counter()
    with torch.no_grad():
        model((tokens, positions))
    return {"prefill": between - start, "forward": time.perf_counter() - between}


def _figures(args, times: List[float], tokens: torch.Tensor) -> Figures:
    """times: the start, then when each new token was there; tokens: the new ones [b, n]."""
    from megatron.costs import kv_cache_bytes, num_parameters

    batch, new = tokens.shape
    embedding = args.padded_vocab_size * args.hidden_size
    weights = (num_parameters(args) - embedding) * args.params_dtype.itemsize
    return {
        "seconds": (times[-1] - times[1]) / (new - 1),
        "prompt": times[1] - times[0],
        "tokens": tokens.tolist(),
        "bytes": weights + kv_cache_bytes(args, batch, PROMPT + new // 2),
        "cache": kv_cache_bytes(args, batch, PROMPT + new - 1),
    }


def prompts(given: Dict[str, Any], batch: int, length: int = PROMPT) -> torch.Tensor:
    """Random tokens [b, length], the same in every process."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, given["padded_vocab_size"], (batch, length), generator=generator)


def _arguments(given: Dict[str, Any], precision: str):
    from megatron.neox_arguments import NeoXArgs

    values = {key: value for key, value in given.items() if key not in OWN_KEYS}
    return NeoXArgs.from_dict({**values, "precision": precision})


def _twin(given: Dict[str, Any], args):
    """Our model with the weights of transformers' one."""
    from megatron.model.gpt2_model import build_model

    model, theirs = build_model(args).eval(), causal_lm(given).state_dict()
    for index, layer in model.local_layers():
        if isinstance(layer, torch.nn.Module):
            layer.load_state_dict(_weights(index, theirs, args.num_layers))
    return model


def _weights(index: int, theirs: Dict[str, torch.Tensor], num_layers: int) -> Dict[str, torch.Tensor]:
    """A layer's state from that of Qwen3ForCausalLM, by its index in our list of layers."""
    if index == 0:
        return {"word_embeddings.weight": theirs["model.embed_tokens.weight"]}
    if index == num_layers + 3:
        return {"norm.scale": theirs["model.norm.weight"]}
    if index == num_layers + 4:
        return {"final_linear.weight": theirs["lm_head.weight"]}

    def of(*names: str) -> torch.Tensor:
        return torch.cat([theirs[f"model.layers.{index - 2}.{name}.weight"] for name in names])

    return {
        "input_layernorm.scale": of("input_layernorm"),
        "post_attention_layernorm.scale": of("post_attention_layernorm"),
        "attention.query_key_value.weight": of(*(f"self_attn.{x}_proj" for x in "qkv")),
        "attention.dense.weight": of("self_attn.o_proj"),
        "attention.q_layernorm.scale": of("self_attn.q_norm"),
        "attention.k_layernorm.scale": of("self_attn.k_norm"),
        "mlp.linear1.weight": of("mlp.up_proj", "mlp.gate_proj"),
        "mlp.linear2.weight": of("mlp.down_proj"),
    }
