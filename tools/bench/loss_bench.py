"""Memory of the loss's own part, the output layer and the cross entropy forward and backward, at a large vocabulary.

    python -m tools.bench.loss_bench [--vocabulary 151936] [--precision bfloat16 fp32] [--chunk 512] [--out DIR]

transformers' lm_head and loss against ours: whole logits, and fused (fused_loss_chunk) on one rank and on two, which
share the vocabulary. Hidden 512, batch 4 x 512. Every rank is a process of its own, which gives freed memory back at
once; what grows is its resident memory in a step, the weight's new gradient included. Of two ranks it is the sum, since
transformers' is the whole vocabulary too.
"""

import functools
import os
import sys
import tempfile
from contextlib import ExitStack
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from tools.bench import report
from tools.bench.workers import RETURNING_MALLOC, Worker, median

HIDDEN, BATCH, TOKENS = 512, 4, 512
PEER, WHOLE, FUSED, FUSED_TP = "transformers", "ours, whole logits", "ours, fused", "ours, fused, two ranks"
LINES = (PEER, WHOLE, FUSED, FUSED_TP)
WANTED = 0.2
Settings = Dict[str, Any]
Step = Callable[[], Dict[str, float]]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the benchmark."""
    parser = report.parser(__doc__, "loss")
    parser.add_argument("--vocabulary", type=int, default=151936, help="Qwen3's by default")
    parser.add_argument("--precision", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--chunk", type=int, default=512, help="tokens whose logits exist at one time")
    parser.add_argument("--lines", nargs="+", choices=LINES, default=LINES, metavar="LINE", help="of ours, which")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    rows, targets = [], []
    for precision in options.precision:
        given = dict(vocabulary=options.vocabulary, precision=precision, chunk=options.chunk)
        found = {name: measured(name, given, options.repeats) for name in LINES if name in (PEER, *options.lines)}
        peer = found[PEER]["bytes"]
        for name, each in found.items():
            line = {
                "line": f"{precision}: {name}",
                "MiB": each["bytes"] / 2**20,
                "x transformers": each["bytes"] / peer,
            }
            rows.append({**line, "loss": each["loss"]})
        for name in (name for name in found if name in (FUSED, FUSED_TP)):
            goal = f"{precision}: memory of the loss / transformers', {name.removeprefix('ours, ')}"
            targets.append(report.Target(goal, WANTED, found[name]["bytes"] / peer))
    title = f"output layer and loss, {options.vocabulary} tokens"
    report.report(options.out, "loss", title, rows, targets=targets, picture=report.bars("MiB", "peak memory, MiB"))
    return 0


def measured(name: str, given: Settings, repeats: int) -> Dict[str, float]:
    """Medians of a line: bytes over all ranks, and the loss."""
    ranks = 2 if name == FUSED_TP else 1
    target = "tools.bench.loss_bench:" + ("peer" if name == PEER else "whole" if name == WHOLE else "fused")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        places = [dict(rank=rank, ranks=ranks, store=os.path.join(folder, "store")) for rank in range(ranks)]
        workers = [stack.enter_context(Worker(target, {**given, **place}, RETURNING_MALLOC)) for place in places]
        rounds = [together(workers) for _ in range(repeats + 1)][1:]
    return {figure: median(rounds, figure) for figure in ("bytes", "loss")}


def together(workers: Sequence[Worker]) -> Dict[str, float]:
    """One step of all ranks at the same time."""
    for worker in workers:
        worker.begin()
    results = [worker.result() for worker in workers]
    grown = sum(each["peak_rss"] - each["rss_before"] for each in results)
    return dict(bytes=grown, loss=results[0]["loss"])


def peer(settings: Settings) -> Step:
    """A worker: the lm_head of transformers' models and the loss function that they call."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, weight, labels = tensors(settings)

    def loss() -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight)
        return ForCausalLMLoss(logits, None, settings["vocabulary"], shift_labels=labels)

    return stepping(loss, [hidden, weight])


def whole(settings: Settings) -> Step:
    """A worker: our loss of whole logits."""
    from megatron.model.gpt2_model import masked_cross_entropy

    hidden, weight, labels = tensors(settings)
    mask = torch.ones(labels.shape)
    return stepping(
        lambda: masked_cross_entropy(torch.nn.functional.linear(hidden, weight), (labels, mask)), [hidden, weight]
    )


def fused(settings: Settings) -> Step:
    """A worker: our fused loss, of one rank's share of the vocabulary. The ranks meet in the first step, which they
    begin together; until a worker is built, nothing else is."""
    build = functools.cache(lambda: _fused(settings))
    return lambda: build()()


def _fused(settings: Settings) -> Step:
    from megatron import mpu
    from megatron.mpu.fused_linear_cross_entropy import FusedLinearCrossEntropy

    if settings["ranks"] > 1:
        store = torch.distributed.FileStore(settings["store"], settings["ranks"])
        torch.distributed.init_process_group("gloo", store=store, rank=settings["rank"], world_size=settings["ranks"])
        mpu.initialize_model_parallel(settings["ranks"])
    hidden, weight, labels = tensors(settings)
    function, mask = FusedLinearCrossEntropy(settings["chunk"]), torch.ones(labels.shape)
    return stepping(lambda: function(hidden, weight, None, (labels, mask)), [hidden, weight])


def tensors(settings: Settings) -> List[torch.Tensor]:
    """hidden states [b, s, h], this rank's rows of the weight [v/p, h], labels [b, s]; the same on every number of
    ranks."""
    make, dtype = torch.Generator().manual_seed(1), getattr(torch, settings["precision"])
    hidden = torch.randn(BATCH, TOKENS, HIDDEN, generator=make).to(dtype)
    labels = torch.randint(0, settings["vocabulary"], (BATCH, TOKENS), generator=make)
    weight = (torch.randn(settings["vocabulary"], HIDDEN, generator=make) * HIDDEN**-0.5).to(dtype)
    weight = weight.chunk(settings["ranks"])[settings["rank"]].clone()
    return [hidden.requires_grad_(), weight.requires_grad_(), labels]


def stepping(loss_of: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]) -> Step:
    """Forward and backward; the gradients are dropped."""

    def step() -> Dict[str, float]:
        loss = loss_of()
        loss.backward()
        for parameter in parameters:
            parameter.grad = None
        return {"loss": loss.item()}

    return step


if __name__ == "__main__":
    sys.exit(main())
