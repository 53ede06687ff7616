"""Training and checkpoints: cases for the checkouts' engine, and the same by this project's."""

import itertools
import os

import torch

from megatron.checkpointing import load_model_weights, save_checkpoint
from megatron.errors import CheckpointError
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model
from megatron.mpu.mappings import gather_from_model_parallel_region
from megatron.training import train_step
from tests.helpers.engines import build_engine
from tests.neox_patch import grid, ours
from tests.neox_patch.checkouts import case

STEPS = 2
NAMES = ("non-divisible GQA", "pipeline", "per_head, GQA")
"""Of grid.WIDTHS: trained, saved, loaded, resumed."""
PLAIN = {"llama GQA": 0, "llama MHA, pipeline": 1}
"""Of grid.ABSENT: trained and saved; and the pipe_parallel_size."""
SWAPPED = dict(num_attention_heads=12, num_kv_heads=4, head_dim=12)
"""In the place of 6, 2 and 24: every tensor keeps its shape, and it is another model."""
SWAPPED_PER_HEAD_IS_CAUGHT_BY_SHAPES = "per_head, GQA"


def settings(values, **more):
    """Arguments with what saving needs."""
    rate = dict(lr_decay_style="constant", warmup=0.0)  # the states differ in the rate of the first step of a warmup
    return {**grid.arguments(values), "checkpoint_factor": 1, "gradient_clipping": 1.0, **rate, **more}


def plain_cases(folder):
    """Train and save without new arguments."""
    return [
        _case(
            f"trains: {name}",
            settings(grid.ABSENT[name], save=os.path.join(folder, name)),
            ["train", "save", "forward"],
        )
        for name in PLAIN
    ]


def exchange_cases(folder):
    """Load, without new arguments, what the other checkout has saved into `folder`."""
    return [
        _case(f"loads: {name}", settings(grid.ABSENT[name], load=os.path.join(folder, name)), ["forward", "train"])
        for name in PLAIN
    ]


def width_cases(weights, our_saves, folder, tp):
    """Train and save with new arguments; load and resume what this project saved; be refused."""
    for name in NAMES:
        values = grid.WIDTHS[name]
        files = os.path.join(weights[name][1][tp], "global_step7")
        save = settings(values, save=os.path.join(folder, name))
        yield _case(f"trains: {name}", save, ["train", "save", "forward"], weights=files)
        if tp > 1 and not values.get("pipe_parallel_size"):
            split = settings(values, sequence_parallel=True)
            yield _case(f"sequence parallel: {name}", split, ["train"], weights=files)
        load = settings(values, load=our_saves[name]["folder"])
        yield _case(f"resumes: {name}", load, ["forward", "train"])
        if name != SWAPPED_PER_HEAD_IS_CAUGHT_BY_SHAPES:
            swapped = settings({**values, **SWAPPED}, load=our_saves[name]["folder"])
            yield _case(f"refuses: {name}", swapped, ["forward"])


def _case(name, values, do, **more):
    return case(name, values, grid.ids(), do=do, engine=True, steps=STEPS, iteration=STEPS, **more)


def our_training(rank, tp, weights, folder):
    """{name: folder, losses, the losses after saving, logits when saved} by this project's engine."""
    results = {}
    for name in NAMES:
        save = os.path.join(folder, f"{name} tp{tp}")
        values = settings(grid.WIDTHS[name], load=weights[name], finetune=True, save=save)
        neox_args = ours.arguments(values, tp)
        engine = build_engine(neox_args)
        results[name] = {"folder": save, "losses": _train(neox_args, engine)}
        save_checkpoint(neox_args, STEPS, engine)
        results[name]["logits"] = _logits(engine.module)
        results[name]["losses after"] = _train(neox_args, engine)
    return results


def _train(neox_args, engine):
    engine.train()
    batches = itertools.repeat({"text": grid.ids()})
    return [train_step(neox_args, engine, batches)["loss"] for _ in range(STEPS)]


def _logits(model):
    tokens = grid.ids()[:, :-1].contiguous()
    with torch.no_grad():
        logits = model((tokens, torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()))
    return gather_from_model_parallel_region(logits).numpy()


def our_reading(rank, tp, folders):
    """{name: (logits of what a checkout saved, what is said when the geometry is another one)} by this project."""
    results = {}
    for name, folder in folders.items():
        neox_args = ours.arguments(settings(grid.WIDTHS[name], load=folder), tp)
        initialize_megatron(neox_args)
        model = build_model(neox_args)
        load_model_weights(neox_args, model)
        results[name] = (_logits(model), _refusal(name, folder, tp))
    return results


def _refusal(name, folder, tp):
    neox_args = ours.arguments(settings({**grid.WIDTHS[name], **SWAPPED}, load=folder), tp)
    model = build_model(neox_args)
    try:
        load_model_weights(neox_args, model)
    except CheckpointError as error:
        return str(error)
    return None
