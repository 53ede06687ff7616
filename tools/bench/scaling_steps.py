"""What the scaling study runs in its workers: training steps of small models, on one rank or more, and decoding.

Each function takes the settings of a worker (see tools/bench/workers.py) and returns the step that is measured.
"""

import gc
import multiprocessing
import os
import time
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.distributed as dist

from tools.bench.workers import Figures, measured, memory

Settings = Dict[str, Any]
Step = Callable[[], Figures]

_TINY: Settings = dict(num_layers=1, ffn_hidden_size=64, padded_vocab_size=128)


def training_steps(settings: Settings) -> Step:
    """Several models in one process, which take one training step each in turn.

    settings: `models`, the arguments of each by name, all for one rank. A step returns `points`: the figures of each.
    """
    steps = {name: _training(arguments) for name, arguments in settings["models"].items()}
    return lambda: {"points": {name: measured(step) for name, step in steps.items()}}


def _training(arguments: Settings) -> Callable[[], Optional[Figures]]:
    """One optimizer step of the real engine, on the same random tokens each time; device_bytes: of a GPU, at most."""
    from megatron.initialize import initialize_megatron
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import setup_model_and_optimizer, train_step

    args = NeoXArgs.from_dict(arguments)
    initialize_megatron(args)
    engine = setup_model_and_optimizer(args)
    engine.train()
    shape = (args.train_micro_batch_size_per_gpu, args.seq_length + 1)
    tokens = torch.randint(0, args.padded_vocab_size, shape, generator=torch.Generator().manual_seed(1))

    def step() -> Optional[Figures]:
        train_step(args, engine, iter([{"text": tokens}] * args.gradient_accumulation_steps))
        return {"device_bytes": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else None

    return step


def ranks(settings: Settings) -> Step:
    """One model on several processes; this one is rank 0. A step is a training step of all of them.

    settings: `arguments` of the model, `world_size`, and `store`, a file that is not there yet, through which the
    ranks meet. A step returns `rank_bytes`: what each rank holds at most during the step, beyond what it held
    before its model was built and after a tiny one had run, which brings the code into memory.
    """
    context = multiprocessing.get_context("spawn")
    pipes = []
    for rank in range(1, settings["world_size"]):
        ours, theirs = context.Pipe()
        context.Process(target=_follow, args=(settings, rank, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    run = _rank(settings, 0)

    def step() -> Figures:
        for pipe in pipes:
            pipe.send("step")
        own = run()
        return {"rank_bytes": [own, *(pipe.recv() for pipe in pipes)]}

    return step


def _follow(settings: Settings, rank: int, pipe) -> None:
    """Another rank: a step whenever rank 0 takes one, until that has gone."""
    run = _rank(settings, rank)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(run())


def _rank(settings: Settings, rank: int) -> Callable[[], int]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings["world_size"]))
    dist.init_process_group(
        "gloo", init_method=f"file://{settings['store']}", rank=rank, world_size=settings["world_size"]
    )
    arguments = settings["arguments"]
    _training({**arguments, **_TINY})()
    gc.collect()
    before = memory("VmRSS")
    train = _training(arguments)
    return lambda: measured(train)["peak_rss"] - before


def decoding(settings: Settings) -> Step:
    """Several models of random weights that continue prompts greedily, with a key/value cache.

    settings: `models`, the arguments of each by name; `batch`, `prompt`, `new`: numbers of texts and of tokens.
    A step returns `points`: of each the seconds per new token after the first, and the bytes of the cache.
    """
    runs = {name: _decoder(arguments, settings) for name, arguments in settings["models"].items()}
    return lambda: {"points": {name: run() for name, run in runs.items()}}


def _decoder(arguments: Settings, settings: Settings) -> Step:
    from megatron.initialize import initialize_megatron
    from megatron.model.gpt2_model import build_model
    from megatron.mpu import current_device
    from megatron.neox_arguments import NeoXArgs
    from megatron.text_generation.runner import InferenceRunner
    from megatron.text_generation.stream import stream_tokens

    args = NeoXArgs.from_dict(arguments)
    initialize_megatron(args)
    runner = InferenceRunner(args, build_model(args).to(current_device()))
    shape = (settings["batch"], settings["prompt"])
    prompts = torch.randint(1, args.padded_vocab_size, shape, generator=torch.Generator().manual_seed(1)).tolist()

    def run() -> Figures:
        first, last = _first_and_last(stream_tokens(args, runner, prompts, -1, settings["new"]))
        return {"seconds": (last - first) / (settings["new"] - 1), "cache_bytes": runner.cache_bytes}

    return run


def _first_and_last(stream) -> Tuple[float, float]:
    """The times at which a stream's first and last values came."""
    times = [time.perf_counter() for _ in stream]
    return times[0], times[-1]
