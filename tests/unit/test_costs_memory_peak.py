"""The estimated total against the peak of a whole training step, as torch's CPU allocator reports it event by event,
so that neither the machine nor the system's accounting matters."""

import gc

from torch.profiler import ProfilerActivity, profile, record_function

from megatron import costs
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.engines import build_engine, train

BUCKET = dict(reduce_bucket_size=1000)
SIZES = {
    "small": dict(
        num_layers=3, hidden_size=96, num_attention_heads=4, num_kv_heads=2, head_dim=40, seq_length=64,
        padded_vocab_size=1024,
    ),
    "middle": dict(
        num_layers=4, hidden_size=192, num_attention_heads=6, num_kv_heads=2, head_dim=64, seq_length=288,
        padded_vocab_size=512,
    ),
    "large": dict(
        num_layers=6, hidden_size=384, num_attention_heads=4, num_kv_heads=1, head_dim=128, seq_length=128,
        padded_vocab_size=2048,
    ),
}  # fmt: skip
"""Whose peaks are at the loss, in the layers, and in the optimizer's step."""
VARIANTS = {
    "plain": {},
    "half": dict(precision="bfloat16"),
    "checkpointed": dict(checkpoint_activations=True, checkpoint_num_layers=2, train_micro_batch_size_per_gpu=4),
    "global_gelu": dict(attention_config="global", activation="gelu", norm="layernorm"),
    "half_zero1_accumulated": dict(
        precision="bfloat16", zero_optimization=dict(stage=1, **BUCKET), gradient_accumulation_steps=2
    ),
    "half_zero2": dict(precision="bfloat16", zero_optimization=dict(stage=2, **BUCKET)),
    "widths_by_layer": dict(head_dim=[[32, 2], [96, 2]]),
    "groups_of_heads": dict(head_dim=[[64, 4], dict(layer=[1, 3], groups=[[32, 3, 1], [96, 3, 1]])]),
    "pipeline": dict(pipe_parallel_size=1, gradient_accumulation_steps=2),
}

RUNS = {
    "small": ("half_zero2", "pipeline"),
    "middle": ("plain", "half", "checkpointed", "global_gelu", "widths_by_layer", "groups_of_heads"),
    "large": ("plain", "half_zero1_accumulated"),
}


def arguments(size, variant):
    settings = {**SIZES[size], "norm": "rmsnorm", "activation": "swiglu", "max_position_embeddings": 512}
    settings.update(VARIANTS[variant])
    if "attention_config" in settings:
        settings["attention_config"] = [settings["attention_config"]] * settings["num_layers"]
    return tiny_args(**settings)


def peak_of_a_step(args) -> int:
    """Allocated bytes at most during a step, of what was allocated since before the model was built.

    The least of three steps: now and then the sums of gradients of the step before are still held in one.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine = build_engine(args)
        train(args, engine, 2)
        gc.collect()
        for number in range(2, 5):
            with record_function("a step"):
                train(args, engine, 1, first=number)
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    events = sorted(_all(tree), key=lambda event: event.start_time_ns)
    owned, live, step, peaks = {}, 0, -1, [0, 0, 0]
    for event in events:
        step += event.name == "a step"
        if event.name != "[memory]":
            continue
        pointer, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            owned[pointer] = size
        live += size if size > 0 else -owned.pop(pointer, 0)  # what an earlier model leaves may be freed meanwhile
        if step >= 0:
            peaks[step] = max(peaks[step], live)
    return min(peaks)


def _all(events):
    pending = list(events)
    while pending:
        event = pending.pop()
        pending += event.children
        yield event


def _peaks(rank, world_size):
    return {(size, variant): peak_of_a_step(arguments(size, variant)) for size in RUNS for variant in RUNS[size]}


def test_the_peak_of_a_step_is_within_a_tenth(tmp_path):
    (peaks,) = run_distributed(1, _peaks, tmp_path=tmp_path)
    ratios = {
        run: round(costs.memory_per_rank(arguments(*run), device="cpu").total / peak, 3) for run, peak in peaks.items()
    }
    print(ratios)
    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), ratios
