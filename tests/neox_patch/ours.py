"""What this project's own model computes from the same files; runs under tests.helpers.distributed.run_distributed."""

import types

import torch

from megatron.checkpointing import load_model_weights
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model, cross_entropy
from megatron.mpu.mappings import gather_from_model_parallel_region
from megatron.neox_arguments import NeoXArgs
from megatron.text_generation import InferenceRunner, stream_tokens


def arguments(values, tp, **more):
    """NeoXArgs of a configuration; no tokenizer is needed. The kernel is the fastest of this project's own."""
    values = {key: value for key, value in values.items() if key != "attention_config"}
    neox_args = NeoXArgs.from_dict({**values, "model_parallel_size": tp, "global_num_gpus": tp, **more})
    neox_args.tokenizer = types.SimpleNamespace(eod=0, pad=1, vocab_size=neox_args.padded_vocab_size)
    return neox_args


def results(rank, tp, cases, ids, prompts, new_tokens):
    """{name: logits, loss, this rank's gradients, greedy tokens} of `cases`, {name: (arguments, checkpoint)}."""
    return {name: _result(rank, tp, *case, ids, prompts, new_tokens) for name, case in cases.items()}


def _result(rank, tp, values, folder, ids, prompts, new_tokens):
    neox_args = arguments(values, tp, load=folder)
    initialize_megatron(neox_args)
    model = build_model(neox_args)
    load_model_weights(neox_args, model)
    tokens, labels = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
    logits = model((tokens, torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()))
    whole = gather_from_model_parallel_region(logits.detach())
    loss = cross_entropy(neox_args)(logits, (labels, torch.ones(labels.shape)))
    loss.backward()
    result = {"logits": whole.numpy(), "loss": loss.item(), "grads": dict(_gradients(model)), "cached": []}
    runner = InferenceRunner(neox_args, model)
    for prompt in prompts:
        options = dict(maximum_tokens=new_tokens, eos_token_id=neox_args.padded_vocab_size)
        *_, state = stream_tokens(neox_args, runner, [list(prompt)], **options)
        result["cached"].append(state.tokens[0, len(prompt) : len(prompt) + new_tokens].tolist())
    return result


def _gradients(model):
    for index, layer in model.local_layers():
        if isinstance(layer, torch.nn.Module):
            for name, parameter in layer.named_parameters():
                if parameter.grad is not None:
                    yield f"layer_{index:02d}.{name}", parameter.grad.numpy()
