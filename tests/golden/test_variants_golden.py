"""Loss and every gradient of the kinds of model that GPT-NeoX made no golden numbers of, against the plain fp64 model.

The plain model itself equals the golden logits: the last test here.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from megatron.checkpointing.model_settings import inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.weights import load_weights_from
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.golden import cases
from tests.golden.test_model_golden import RELATIVE_GRADIENT_NORM
from tests.helpers.distributed import run_distributed
from tests.helpers.plain_model import Plain
from tests.helpers.tolerances import FORWARD, LOSS
from tests.unit.test_tools_ckpts_dump_logits import MODELS, SIZES, VOCABULARY, token_ids

SEQ = 20


def plain_gradients(name, tp):
    """(loss, {(layer, name): gradient of the whole parameter in fp64})."""
    model = Plain({**SIZES, **MODELS[name]}, VOCABULARY)
    for key, value in model.weights.items():
        model.weights[key] = value.double().requires_grad_(not key[1].endswith(("inv_freq", "slopes")))
    ids = torch.from_numpy(token_ids(columns=SEQ + 1))
    loss = F.cross_entropy(model.logits(ids[:, :-1], tp).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {key: value.grad for key, value in model.weights.items() if value.grad is not None}
    layers = [key for key in gradients if key[1] == "attention.rpe.weight"]
    total = sum(gradients[key] for key in layers)  # one table, which every layer's file repeats
    gradients.update(dict.fromkeys(layers, total))
    return loss.item(), gradients


def share(name, gradients, key, rank, tp):
    """What a rank's copy of the parameter has as gradient: copies that are added up have all of it."""
    model = Plain({**SIZES, **MODELS[name], "gpt_j_residual": False}, VOCABULARY)
    model.weights = gradients
    return model.rank_share(key, rank, tp)


def faults(name, folder, pp, tp, rank):
    """Everything in which one model on this rank differs."""
    args = inference_args(CheckpointReader(folder)).update(pipe_parallel_size=pp)
    initialize_megatron(args)
    model = build_model(args)
    load_weights_from(args, model, folder)
    ids = torch.from_numpy(token_ids(columns=SEQ + 1))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    loss = cross_entropy(args)(model((tokens, torch.arange(SEQ).expand_as(tokens))), (labels, torch.ones(labels.shape)))
    loss.backward()
    wanted_loss, wanted = plain_gradients(name, tp)
    found = [] if abs(loss.item() - wanted_loss) <= LOSS else [f"loss {loss.item()} is not {wanted_loss}"]
    ours = {
        (index, key): parameter.grad
        for index, layer in model.local_layers()
        if isinstance(layer, torch.nn.Module)
        for key, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    found += [f"{key}: a gradient on one side only" for key in set(ours) ^ set(wanted) if not _is_repeated(key, args)]
    for key in set(ours) & set(wanted):
        expected = share(name, wanted, key, rank, tp)
        difference = ((ours[key].double() - expected).norm() / expected.norm()).item()
        if not difference <= RELATIVE_GRADIENT_NORM:
            found.append(f"{key}: gradient differs by {difference:.2g} of its norm")
    return [f"{name}, tp {tp}, pp {pp}, rank {rank}: {fault}" for fault in found]


def _is_repeated(key, args):
    """The tied embedding, which the pipeline lists as the last layer as well."""
    return not args.no_weight_tying and key[0] == args.num_layers + 4


def all_faults(rank, world_size, folders):
    return [
        fault
        for name, folder in folders.items()
        for pp in (0, 1)
        for fault in faults(name, folder, pp, world_size, rank)
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_loss_and_gradients(tp, tmp_path):
    folders = {
        name: Plain({**SIZES, **config}, VOCABULARY).save(tmp_path / str(number), tp=tp)
        for number, (name, config) in enumerate(MODELS.items())
    }
    found = sum(run_distributed(tp, all_faults, folders, tmp_path=tmp_path), [])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", cases.TP1)
def test_the_plain_model_is_gpt_neox(case):
    config = yaml.safe_load((cases.DATA / case / "config.yml").read_text())
    model = Plain(config, cases.vocabulary(case))
    model.weights = {
        (index, name): tensor
        for index in (cases.EMBEDDING, 2, 3, cases.NORM, cases.HEAD)
        for name, tensor in cases.layer_state(case, 1, 0, index).items()
    }
    golden, _, _ = cases.expected(case, 1)
    difference = np.abs(model.logits(cases.tokens_and_labels(case)[0])[:, ::4].numpy() - golden.numpy()).max()
    assert difference <= FORWARD[torch.float32]
