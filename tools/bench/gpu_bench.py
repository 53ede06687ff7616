"""A stack of Qwen3-4B's layers on one GPU: training step, MFU and decoding. Started by tools/bench/gpu.sh.

    python -m tools.bench.gpu_bench [--only train decode] [--layers 8] [--peak-tflops T] [--out DIR]
    python -m tools.bench.gpu_bench --device cpu --tiny

Not run on a GPU by this project; the second form runs the same code on a small model. Limits are measured beside it:
the step's bare matrix products, and copying memory. What cannot run is named with its reason, and is no failure.
"""

import sys
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from megatron import costs
from megatron.errors import BackendError, NeoXError
from megatron.neox_arguments import NeoXArgs
from tools.bench.report import Row, bars, parser, report
from tools.bench.shapes import settings
from tools.bench.workers import Figures, Worker, WorkerError, interleaved, median
from tools.head_dim.devices import DEVICES

Arguments = Dict[str, Any]

QWEN3_4B: Dict[str, Any] = dict(
    hidden_size=2560, num_attention_heads=32, num_kv_heads=8, head_dim=128, ffn_hidden_size=9728,
    padded_vocab_size=151936, seq_length=4096, max_position_embeddings=40960,
)  # fmt: skip
TINY: Dict[str, Any] = dict(
    hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=16, ffn_hidden_size=96, padded_vocab_size=512,
    seq_length=256, max_position_embeddings=256,
)  # fmt: skip
LAYERS = 8
VARIANTS: Dict[str, Arguments] = {
    "flash": dict(attention_config="flash"),
    "chunked": dict(attention_config="chunked"),
    "te_mha, te_layernorm_mlp": dict(te_mha=True, te_layernorm_mlp=True, qk_norm_type=None),
}
"""Transformer Engine's attention has no norm on queries and keys."""
PROMPT, NEW, BATCHES = 64, 128, (1, 4)
ROOM = 0.8
"""The share of the device's memory that the estimate may fill."""
REPEATS = 5
_OWN, _STEPS = "tools.bench.gpu_bench", "tools.bench.scaling_steps"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the parts that are wanted; returns 1 where there is no such device."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch.cuda.is_available() is False: no GPU, or a torch built without CUDA", file=sys.stderr)
        return 1
    print(f"device: {device_name(options.device)}")
    layers = fitting_layers(options)
    for part in options.only:
        PARTS[part](options, layers)
    return 0


def parse(arguments: Optional[Sequence[str]] = None):
    """The command line."""
    line = parser(__doc__, "gpu_PART")
    line.add_argument("--only", nargs="+", choices=("train", "decode"), default=["train", "decode"])
    line.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    line.add_argument("--layers", type=int, default=LAYERS, help="fewer if memory is short; default: %(default)s")
    line.add_argument("--peak-tflops", type=float, help="of the device in bf16, dense; known ones need no figure")
    line.add_argument("--tiny", action="store_true", help="a small model, to try the program itself")
    line.add_argument("--repeats", type=int, default=REPEATS)
    return line.parse_args(arguments)


def device_name(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def fitting_layers(options) -> int:
    """As many layers as are asked for, or as the memory holds by megatron.costs' estimate."""
    if options.device == "cpu":
        return options.layers
    room = ROOM * torch.cuda.get_device_properties(0).total_memory
    for layers in range(options.layers, 0, -1):
        needed = max(_needed(options, layers, name) for name in VARIANTS)
        if needed <= room:
            print(f"{layers} layers: the step is estimated to take {needed / 1e9:.1f} GB of {room / 1e9:.1f} GB")
            return layers
    raise BackendError(f"one layer of this model does not fit into {room / 1e9:.1f} GB; use --tiny")


def _needed(options, layers: int, name: str) -> int:
    return costs.memory_per_rank(NeoXArgs.from_dict(model(options, layers, name))).total


def model(options, layers: int, variant: str) -> Arguments:
    """Arguments of the stack. Embedding and head are tied, as in Qwen3-4B."""
    own = dict(VARIANTS[variant])
    kernel = own.pop("attention_config", None)
    if kernel is not None:
        own["attention_config"] = [[[kernel], layers]]
    shape = {**(TINY if options.tiny else QWEN3_4B), "num_layers": layers, "no_weight_tying": False, **own}
    backend = "nccl" if options.device == "cuda" else "gloo"
    on_cpu = options.device == "cpu"
    return settings(
        shape, train_micro_batch_size_per_gpu=1, distributed_backend=backend, use_cpu_initialization=on_cpu
    )  # fmt: skip


def run_train(options, layers: int) -> None:
    """A training step of every variant, and of transformers' model, beside the bare matrix products."""
    plain = model(options, layers, "flash")
    targets = {
        "bare matrix products": (f"{_OWN}:products", plain),
        **{name: (f"{_STEPS}:training_steps", model(options, layers, name)) for name in VARIANTS},
        "transformers, sdpa": (f"{_OWN}:peer", plain),
    }
    found = {name: steps for name, each in targets.items() if (steps := _steps(options, name, *each))}
    args = NeoXArgs.from_dict(plain)
    rows = [train_row(name, found[name], args, peak_tflops(options), found) for name in found]
    shape = "a tiny model" if options.tiny else "Qwen3-4B's shape"
    title = f"Training step, {layers} layers of {shape}, {args.seq_length} tokens, bf16"
    drawn = bars("seconds", "seconds of a step")
    _report(options, "gpu_train", title, rows, drawn)


def _steps(options, name: str, target: str, arguments: Arguments) -> Optional[List[Figures]]:
    """Figures of one worker's steps, alone on the device; None, with the reason printed, if it cannot run."""
    try:
        ours = {"models": {"it": arguments}} if target.startswith(_STEPS) else arguments
        with Worker(target, {**ours, "device": options.device}, {"DS_ACCELERATOR": options.device}) as worker:
            steps = interleaved({name: worker}, options.repeats, warmup=2)[name]
    except WorkerError as error:
        reason = str(error).strip().splitlines()[-1].rpartition("Error: ")[2]
        print(f"skipped: {name}: {reason}", file=sys.stderr)
        return None
    return [each["points"]["it"] if "points" in each else each for each in steps]


def train_row(
    name: str, steps: List[Figures], args: NeoXArgs, peak: Optional[float], found: Dict[str, List[Figures]]
) -> Row:
    """Speed of one variant; both countings of operations, and their share of the device's peak."""
    seconds, tokens = median(steps), args.train_micro_batch_size_per_gpu * args.seq_length
    row: Row = {"step": name, "seconds": seconds, "tokens/s": tokens / seconds}
    if name == "bare matrix products":
        return row
    limit, peer = found.get("bare matrix products"), found.get("transformers, sdpa")
    logged = costs.flops_per_token(args) * tokens / seconds / 1e12
    causal = 3.0 * sum(costs.forward_flops(args, causal=True).values()) * tokens / seconds / 1e12
    row.update({"TFLOP/s": logged, "causal TFLOP/s": causal})
    if peak:
        row.update({"MFU": logged / peak, "causal MFU": causal / peak})
    row["x products"] = seconds / median(limit) if limit else None
    row["x transformers"] = median(peer) / seconds if peer else None
    row["device GB"] = max(each.get("device_bytes", 0) for each in steps) / 1e9 or None
    return row


def peak_tflops(options) -> Optional[float]:
    """Of dense bf16 products: as given, or from the data sheet of the device."""
    if options.peak_tflops or options.device == "cpu":
        return options.peak_tflops
    peak = published_tflops(device_name(options.device))
    if peak is None:
        print(
            "skipped: MFU: this device's peak is not in tools/head_dim/devices.py; give --peak-tflops", file=sys.stderr
        )
    return peak


def published_tflops(name: str) -> Optional[float]:
    """By what a device calls itself, as in "NVIDIA A100-SXM4-80GB": the entry with the most words of that name. None
    for one that is not known, and for the NVL forms, which are slower than what they are named after."""
    words = set(name.upper().replace("-", " ").replace("GB", "").split())
    known = [each for each in DEVICES.values() if words.issuperset(each.name.upper().split("-"))]
    if not known or "NVL" in words:
        return None
    return max(known, key=lambda each: each.name.count("-")).bf16_tflops


def products(arguments: Arguments) -> Callable[[], None]:
    """A worker: tools.bench.limits.matrix_products on the device."""
    from tools.bench.limits import matrix_products

    torch.set_default_device(arguments["device"])
    return synchronized(matrix_products(arguments), arguments["device"])


def peer(arguments: Arguments) -> Callable[[], None]:
    """A worker: forward, backward and fused AdamW of transformers' model, weights and states in bfloat16."""
    from tools.bench.peers import batch, causal_lm

    tokens = batch(arguments).to(arguments["device"])
    with torch.device(arguments["device"]):
        network = causal_lm(arguments).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        network(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return synchronized(step, arguments["device"])


def copying(arguments: Arguments) -> Callable[[], None]:
    """A worker: copies `bytes` of memory on the device."""
    source = torch.ones(arguments["bytes"], dtype=torch.uint8, device=arguments["device"])
    target = torch.zeros_like(source)
    return synchronized(lambda: target.copy_(source), arguments["device"])


def synchronized(step: Callable[[], Any], device: str) -> Callable[[], None]:
    """The step, and what it started on the device."""

    def whole() -> None:
        step()
        if device == "cuda":
            torch.cuda.synchronize()

    return whole


def run_decode(options, layers: int) -> None:
    """Greedy decoding beside the time in which its weights and cache can be read."""
    size = 1 << (22 if options.tiny else 32)
    copied = _steps(options, "copy", f"{_OWN}:copying", {"bytes": size})
    bandwidth = None if copied is None else size / median(copied)
    arguments = model(options, layers, "flash")
    args, rows = NeoXArgs.from_dict(arguments), []
    for batch in BATCHES:
        own = {"models": {"it": arguments}, "batch": batch, "prompt": PROMPT, "new": NEW}
        with Worker(f"{_STEPS}:decoding", own, {"DS_ACCELERATOR": options.device}) as worker:
            steps = interleaved({"it": worker}, options.repeats)["it"]
        seconds = median([each["points"]["it"] for each in steps])
        rows.append(decode_row(batch, seconds, args, bandwidth))
    _report(options, "gpu_decode", f"Decoding, {layers} layers", rows, bars("ms per token", "ms per token"))


def decode_row(batch: int, seconds: float, args: NeoXArgs, bandwidth: Optional[float]) -> Row:
    """Speed at one batch size. Read for each token: every weight once (the embedding is the head), and the cache."""
    read = 2 * costs.num_parameters(args) + costs.kv_cache_bytes(args, batch, PROMPT + NEW // 2)
    limit = read / bandwidth if bandwidth else None
    return {
        "batch": f"batch {batch}",
        "ms per token": 1e3 * seconds,
        "tokens/s": batch / seconds,
        "of the limit": limit / seconds if limit else None,
        "copy GB/s": bandwidth / 1e9 if bandwidth else None,
    }


def _report(options, name: str, title: str, rows: List[Row], picture) -> None:
    report(options.out, name, title, rows, picture=picture, device=device_name(options.device), tiny=options.tiny)


PARTS = {"train": run_train, "decode": run_decode}

if __name__ == "__main__":
    try:
        sys.exit(main())
    except NeoXError as error:
        sys.exit(f"error: {error}")
