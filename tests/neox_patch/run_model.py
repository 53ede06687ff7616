"""Builds models in a checkout of GPT-NeoX on the CPU and writes what they compute. `checkouts.run_cases` calls it.

    python run_model.py CHECKOUT CASES.pt OUT_FOLDER STORE_FILE        (one process per rank: RANK, WORLD_SIZE)

CASES.pt is a list of dicts (see `checkouts.case`); each is run in turn, in this one process, and gives
OUT_FOLDER/NAME.rankR.pt: a dict with what was asked for, or {"error": class name, "message", "traceback"}.
"""

import contextlib
import inspect
import io
import os
import sys
import traceback
import types

import flash_standin
import shims


def main(checkout, cases_file, out, store_file):
    """Run all cases of the file."""
    shims.install()
    flash_standin.install()
    import torch

    cases = torch.load(cases_file, weights_only=False)
    shims.use_checkout(checkout)
    rank, _ = shims.start_ranks(store_file)
    for case in cases:
        result = _guarded(case)
        torch.save(result, os.path.join(out, f"{case['name']}.rank{rank}.pt"))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads must not hold up the exit


def _guarded(case):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return run(case)
    except (Exception, SystemExit) as error:
        text = traceback.format_exc()
        return {"error": type(error).__name__, "message": str(error), "traceback": text, "printed": printed.getvalue()}


def run(case):
    """What one case asks for, in the order of its list `do`."""
    neox_args = arguments(case["args"])
    if case["do"] == ["config"]:
        return {"args": {name: getattr(neox_args, name) for name in case.get("read", ())}}
    initialize(neox_args)
    import torch

    torch.manual_seed(neox_args.seed)
    engine = None
    if case.get("engine"):
        engine = build_engine(neox_args)
        model = engine.module
    else:
        model = build(neox_args)
    if case.get("weights") is not None:
        load_layers(model, case["weights"])
    neox_args.engine_under_test = engine
    result = {
        "iteration": neox_args.iteration,
        "shapes": {name: tuple(tensor.shape) for name, tensor in named(model, "state_dict").items()},
    }
    result["buffers"] = sorted(set(result["shapes"]) - set(named(model, "named_parameters")))
    for action in case["do"]:
        if action != "shapes":
            ACTIONS[action](case, neox_args, model, result)
    return result


def arguments(values):
    """NeoXArgs of the checkout, as its main programs make them."""
    from megatron.neox_arguments import NeoXArgs

    values = dict(values)
    vocabulary = values.pop("padded_vocab_size", 128)
    neox_args = NeoXArgs.from_dict(values)
    neox_args.configure_distributed_args()
    neox_args.tokenizer = types.SimpleNamespace(eod=0, pad=1, vocab_size=vocabulary)
    neox_args.padded_vocab_size = vocabulary
    return neox_args


def initialize(neox_args):
    """Process groups and seeds. What initialize_megatron does besides (kernels, dataset helpers) is not needed."""
    from megatron import initialize as its
    from megatron import mpu

    neox_args.distributed_backend = "gloo"
    mpu.destroy_model_parallel()
    its._initialize_distributed(neox_args=neox_args)
    its._set_random_seed(neox_args.seed)


def build(neox_args):
    """The model as its training makes it: a PipelineModule, or a sequential one."""
    from megatron import training

    return training.get_model(neox_args=neox_args, use_cache=False)


def build_engine(neox_args):
    """DeepSpeed's engine as its training makes it; it has loaded neox_args.load if that is set."""
    from megatron import training

    return training.setup_model_and_optimizer(neox_args=neox_args, use_cache=False)[0]


def layers(model):
    """(global index, module) of all layers with a state."""
    import torch

    if hasattr(model, "sequential"):
        found = enumerate(model.sequential)
    else:
        found = enumerate(model.forward_funcs, start=model._local_start)
    seen = set()
    for index, layer in found:
        if isinstance(layer, torch.nn.Module) and id(layer) not in seen:
            seen.add(id(layer))
            yield index, layer


def named(model, method):
    """{layer_NN.name: tensor}, spelled alike for both kinds of model."""
    tensors = {}
    for index, layer in layers(model):
        items = getattr(layer, method)()
        tensors.update((f"layer_{index:02d}.{name}", value) for name, value in dict(items).items())
    return {name: value for name, value in tensors.items() if hasattr(value, "shape")}


def load_layers(model, folder):
    """Weights of layer files (layer_NN-model_RR-model_states.pt), strictly."""
    import torch

    rank = int(os.environ["RANK"])
    for index, layer in layers(model):
        path = os.path.join(folder, f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
        if os.path.exists(path):
            layer.load_state_dict(torch.load(path, weights_only=True), strict=True)
        elif layer.state_dict():
            raise FileNotFoundError(path)


def batch(case, neox_args):
    """((tokens, position ids, mask), (labels, loss mask)) as its data loading makes them."""
    from megatron.utils import get_ltor_masks_and_position_ids

    ids = case["ids"]  # int64 [b, s + 1]
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    extra = {} if neox_args.sliding_window_width is None else {"sliding_window_width": neox_args.sliding_window_width}
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(
        data=tokens, eod_token=neox_args.tokenizer.eod, eod_mask_loss=neox_args.eod_mask_loss, **extra
    )
    return (tokens, positions, mask), (labels, loss_mask)


def only_logits(output):
    """Sequential models of 2024 return (logits, losses of experts); their own stream_tokens cannot take that."""
    return output[0] if isinstance(output, tuple) else output


def _forward(case, neox_args, model, result):
    """Logits [b, s, v] (all ranks' columns) and the loss."""
    from megatron.model.gpt2_model import cross_entropy
    from megatron.mpu.mappings import gather_from_model_parallel_region

    inputs, targets = batch(case, neox_args)
    model.train()
    logits = only_logits(model(inputs))
    result["logits"] = gather_from_model_parallel_region(logits.detach()).clone()  # the loss edits the logits
    loss = cross_entropy(logits, targets, _fp16=False)
    result["loss"] = loss.item()
    return loss


def _backward(case, neox_args, model, result):
    """Gradients of this rank's parameters."""
    model.zero_grad()
    _forward(case, neox_args, model, result).backward()
    parameters = named(model, "named_parameters")
    result["grads"] = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}


def _state(case, neox_args, model, result):
    """All weights of this rank."""
    result["state"] = {name: tensor.clone() for name, tensor in named(model, "state_dict").items()}


def _generate(case, neox_args, model, result):
    """Greedy tokens of each prompt, with the key/value cache and without. Sequential models only."""
    from megatron.mpu.mappings import gather_from_model_parallel_region
    from megatron.text_generation_utils import stream_tokens
    from megatron.training import get_batch_sequential

    model.set_batch_fn(lambda inputs: get_batch_sequential(inputs, neox_args))
    # In its own generation with pipe_parallel_size 0 each rank would choose among its own rows of the vocabulary.
    whole = lambda inputs: gather_from_model_parallel_region(only_logits(model(inputs)))  # noqa: E731
    engine = types.SimpleNamespace(module=whole, eval=model.eval)
    for key, recompute in (("cached", False), ("recomputed", True)):
        result[key] = []
        for prompt in case["prompts"]:
            model.inference_mode(use_cache=not recompute)
            model.clear_cache()
            model.eval()
            options = dict(maximum_tokens=case["new_tokens"], recompute=recompute)
            options["eos_token_id"] = neox_args.padded_vocab_size  # never: all new tokens are wanted
            *_, (tokens, *_) = stream_tokens(neox_args, engine, [list(prompt)], **options)
            result[key].append(tokens[0, len(prompt) : len(prompt) + case["new_tokens"]].tolist())
    model.clear_cache()
    model.train_mode()


def _train(case, neox_args, model, result):
    """Losses of a few optimizer steps by its own train_step, all on the batch of the case."""
    from megatron import training
    from megatron.utils import Timers

    timers = Timers(use_wandb=False, tensorboard_writer=None, **_comet(Timers))
    engine = neox_args.engine_under_test
    batches = iter([{"text": case["ids"]} for _ in range(case["steps"])])
    result["losses"] = []
    for _ in range(case["steps"]):
        engine.train()
        losses, skipped = training.train_step(
            neox_args=neox_args,
            timers=timers,
            data_iterator=batches,
            model=engine,
            optimizer=engine.optimizer,
            lr_scheduler=engine.lr_scheduler,
        )
        result["losses"].append(float(losses["lm_loss"]))
        assert not skipped


def _comet(timers):
    """An argument that came in 2024."""
    return {"comet_experiment": None} if "comet_experiment" in inspect.signature(timers).parameters else {}


def _save(case, neox_args, model, result):
    """A checkpoint by its own save_checkpoint, into neox_args.save."""
    from megatron.checkpointing import save_checkpoint

    engine = neox_args.engine_under_test
    save_checkpoint(neox_args, case["iteration"], engine, engine.optimizer, engine.lr_scheduler)


ACTIONS = {
    "forward": _forward,
    "backward": _backward,
    "state": _state,
    "generate": _generate,
    "train": _train,
    "save": _save,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
