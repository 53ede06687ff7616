"""Generating text beside transformers' generate, on the same weights, and beside the time of reading the weights.

    python -m tools.bench.decode_bench [--precision P ...] [--batch N ...] [--new-tokens N] [--repeats N] [--out DIR]

Greedy, a prompt of 64 random tokens and 128 more, with a cache, through `stream_tokens` as generate.py calls it. Each
process measures one precision, several processes in turn; times are those of the tokens after the first, the prompt's
own time is a column of its own.

The limit is the time in which the weights (without the embedding) and the cache of a token's mean length can be read.
The rate is that of a copy, which reads every byte and writes it: both are counted.
"""

import sys
import time
from contextlib import ExitStack
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from tools.bench import report
from tools.bench.shapes import settings
from tools.bench.workers import Figures, Worker, interleaved, median, median_ratio

PROMPT = 64
NO_END = -1
PEER, LAYERS, EAGER, COMPILED = "transformers", "ours, layers", "ours", "ours, compiled"
CACHES = {f"ours, compiled, {name} cache": kind for name, kind in (("int8", "int8"), ("fp8", "fp8_e4m3"))}
WANTED = {"bfloat16": {EAGER: 1.7, COMPILED: 2.5}, "fp32": {EAGER: 1.7, COMPILED: 1.5}}
"""Tokens/s x transformers' at least. Compiled bf16 is also to reach OF_LIMIT."""
OF_LIMIT = 0.55


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__, "decode")
    parser.add_argument("--precision", nargs="+", choices=WANTED, default=list(WANTED))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    rows, targets = [], []
    for precision in options.precision:
        given = settings(precision=precision, batches=options.batch, new_tokens=options.new_tokens)
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(f"tools.bench.{target}", given))
                for name, target in (
                    ("copy", "limits:copy_bandwidth"),
                    ("ours", "decode_bench:ours"),
                    ("peer", "decode_bench:transformers"),
                )
            }
            measured = interleaved(workers, options.repeats)
        for batch in options.batch:
            rows += table(precision, batch, measured)
            targets += wanted(precision, batch, measured)
    picture = report.bars("of the limit", "time of reading weights and cache / time of a token", limit=1.0)
    report.report(options.out, "decode", "generation, 65 M Qwen3, greedy", rows, targets=targets, picture=picture)
    return 0


def table(precision: str, batch: int, measured: Dict[str, List[Figures]]) -> List[report.Row]:
    """The lines of one batch size."""
    rate = 2 * median(measured["copy"], "bytes_per_second")
    rows = []
    for name in names(batch, measured):
        figures = whose(name, measured)
        seconds = median(figures, f"{name} {batch}")
        row = {
            "line": f"{precision}, batch {batch}: {name}",
            "ms/token": 1000 * seconds,
            "tokens/s": batch / seconds,
            "x transformers": median_ratio(peer_as(name, batch, measured), figures, f"{name} {batch}"),
            "of the limit": median(figures, f"{name} {batch} bytes") / rate / seconds,
            "prompt, ms": 1000 * median(figures, f"{name} {batch} prompt"),
            "cache, MiB": median(figures, f"{name} {batch} cache") / 2**20,
            "same tokens": same_tokens(figures[-1][f"{name} {batch} tokens"], measured, batch),
        }
        if name == EAGER:
            row["prompt / forward"] = median_ratio(
                renamed(figures, f"prefill {batch}"), renamed(figures, f"forward {batch}")
            )
        rows.append(row)
    return rows


def wanted(precision: str, batch: int, measured: Dict[str, List[Figures]]) -> List[report.Target]:
    """The targets of one batch size."""
    lines = {row["line"].split(": ")[1]: row for row in table(precision, batch, measured)}
    targets = [
        report.Target(f"{precision}, batch {batch}: {name}, tokens/s x transformers", ratio,
                      lines[name]["x transformers"], most=False)
        for name, ratio in WANTED[precision].items()
    ]  # fmt: skip
    name = f"{precision}, batch {batch}"
    if precision == "bfloat16":
        targets.append(
            report.Target(f"{name}: {COMPILED}, of the limit", OF_LIMIT, lines[COMPILED]["of the limit"], most=False)
        )
    targets.append(
        report.Target(f"{name}: time of a prompt / the forward pass's", 1.05, lines[EAGER]["prompt / forward"])
    )
    return targets


def names(batch: int, measured: Dict[str, List[Figures]]) -> List[str]:
    """The lines that were measured with this batch size, the peer first."""
    ours = [key.removesuffix(f" {batch}") for key in measured["ours"][0] if key.endswith(f" {batch}")]
    return [PEER, *(name for name in ours if name.startswith("ours"))]


def whose(name: str, measured: Dict[str, List[Figures]]) -> List[Figures]:
    """The figures of a line's process."""
    return measured["peer" if name == PEER else "ours"]


def peer_as(name: str, batch: int, measured: Dict[str, List[Figures]]) -> List[Figures]:
    """The peer's seconds under the name of another line."""
    return [{f"{name} {batch}": each[f"{PEER} {batch}"]} for each in measured["peer"]]


def renamed(figures: List[Figures], name: str) -> List[Figures]:
    """One figure as `seconds`."""
    return [{"seconds": each[name]} for each in figures]


def same_tokens(tokens: List[List[int]], measured: Dict[str, List[Figures]], batch: int) -> float:
    """The share of new tokens that are the peer's. In half precision one tie changes all that follow."""
    peer = torch.tensor(measured["peer"][-1][f"{PEER} {batch} tokens"])
    return (torch.tensor(tokens) == peer).float().mean().item()


def prompts(given: Dict[str, Any], batch: int, length: int = PROMPT) -> torch.Tensor:
    """Random tokens [b, length], the same in every process."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, given["padded_vocab_size"], (batch, length), generator=generator)


def figures(name: str, batch: int, times: List[float], start: float, tokens, read: int, cache: int) -> Figures:
    """What a line says of one generation; times: when each new token was there."""
    return {
        f"{name} {batch}": (times[-1] - times[0]) / (len(times) - 1),
        f"{name} {batch} prompt": times[0] - start,
        f"{name} {batch} tokens": tokens.tolist(),
        f"{name} {batch} bytes": read,
        f"{name} {batch} cache": cache,
    }


def transformers(given: Dict[str, Any]) -> Callable[[], Figures]:
    """A worker: generate of transformers with its dynamic cache."""
    from tools.bench.peers import causal_lm

    model, args, new = causal_lm(given).eval(), _arguments(given), given["new_tokens"]

    class Times(list):
        """What `generate` calls a streamer: told the prompt, then each token."""

        def put(self, value: torch.Tensor) -> None:
            self.append(time.perf_counter())

        def end(self) -> None:
            pass

    def step() -> Figures:
        result = {}
        for batch in given["batches"]:
            ids, times, start = prompts(given, batch), Times(), time.perf_counter()
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                pad_token_id=0, streamer=times,
            )  # fmt: skip
            result.update(figures(PEER, batch, times[1:], start, out[:, PROMPT:], *_bytes(args, batch, new)))
        return result

    return step


def ours(given: Dict[str, Any]) -> Callable[[], Figures]:
    """A worker: our generation on the same weights in every form, and a long prompt beside the forward pass."""
    from megatron.text_generation import InferenceRunner

    args, model = _twin(given)
    forms = {LAYERS: {}, EAGER: {}, COMPILED: dict(compile=True)}
    if given["precision"] == "bfloat16":
        forms.update({name: dict(compile=True, kv_cache_dtype=kind) for name, kind in CACHES.items()})
    runners = {}
    for name, changes in forms.items():
        changed = args.update(**changes)
        runners[name] = (changed, InferenceRunner(changed, model))
    runners[LAYERS][1]._step = None

    def step() -> Figures:
        result = {}
        for batch in given["batches"]:
            for name, (changed, runner) in runners.items():
                result.update(_generation(name, changed, runner, given, batch))
            result.update(_prefill(given, args, model, runners[EAGER][1], batch))
        return result

    return step


def _generation(name: str, args, runner, given: Dict[str, Any], batch: int) -> Figures:
    from megatron.text_generation import stream_tokens

    texts, new, times, start = prompts(given, batch).tolist(), given["new_tokens"], [], time.perf_counter()
    for state in stream_tokens(args, runner, texts, eos_token_id=NO_END, maximum_tokens=new):
        times.append(time.perf_counter())
        tokens = state.tokens
    return figures(name, batch, times, start, tokens[:, PROMPT : PROMPT + new], *_bytes(args, batch, new))


def _prefill(given: Dict[str, Any], args, model, runner, batch: int) -> Figures:
    """Seconds of a prompt of all but one token of the context, by generation and by the model's forward pass."""
    tokens = prompts(given, batch, args.seq_length - 1)
    positions = torch.arange(tokens.shape[1]).expand(batch, -1)
    runner.start(batch, tokens.shape[1])
    start = time.perf_counter()
    runner.next_token_logits(tokens, positions)
    between = time.perf_counter()
    with torch.no_grad():
        model((tokens, positions))
    return {f"prefill {batch}": between - start, f"forward {batch}": time.perf_counter() - between}


def _bytes(args, batch: int, new: int) -> Tuple[int, int]:
    """(read for a token: weights without the embedding, and the cache at its mean length; the whole cache)."""
    from megatron.costs import kv_cache_bytes, num_parameters

    embedding = args.padded_vocab_size * args.hidden_size
    weights = (num_parameters(args) - embedding) * args.params_dtype.itemsize
    mean = PROMPT + new // 2
    return weights + kv_cache_bytes(args, batch, mean), kv_cache_bytes(args, batch, PROMPT + new - 1)


def _twin(given: Dict[str, Any]):
    """(arguments, our model with the weights of transformers' one)."""
    from megatron.model.gpt2_model import build_model
    from tools.bench.peers import causal_lm

    args = _arguments(given)
    model, theirs = build_model(args).eval(), causal_lm(given).state_dict()
    for index, layer in model.local_layers():
        if isinstance(layer, torch.nn.Module):
            layer.load_state_dict(_weights(index, theirs, args.num_layers))
    return args, model


def _arguments(given: Dict[str, Any]):
    from megatron.neox_arguments import NeoXArgs

    return NeoXArgs.from_dict({key: value for key, value in given.items() if key not in ("batches", "new_tokens")})


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


if __name__ == "__main__":
    sys.exit(main())
