"""The pipeline and the sequential form of one model, and what the outside may rely on in both."""

import torch

from megatron import mpu
from megatron.initialize import initialize_megatron
from megatron.model.attention.core import eager
from megatron.model.gpt2_model import (
    GPT2ModelPipe,
    GPT2ModelSequential,
    build_model,
    cross_entropy,
)
from megatron.model.transformer import ParallelTransformerLayerPipe
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import batch, named_parameters

FORMS = {
    "untied": dict(WIDE_NON_DIVISIBLE),
    "tied": dict(WIDE_NON_DIVISIBLE, no_weight_tying=False),
    "rpe": dict(WIDE_NON_DIVISIBLE, pos_emb="rpe"),
    "checkpointed": dict(WIDE_NON_DIVISIBLE, num_layers=3, checkpoint_activations=True, checkpoint_num_layers=2),
}


def _gradients(model, args):
    inputs, targets = batch()
    logits = model(inputs)
    cross_entropy(args)(logits, targets).backward()
    return logits, {name: p.grad for name, p in named_parameters(model)}


def _faults_of_one_form(name):
    settings = dict(FORMS[name], global_num_gpus=1)
    args = {pp: tiny_args(**settings, pipe_parallel_size=pp) for pp in (0, 1)}
    initialize_megatron(args[1])
    models = {pp: build_model(args[pp]) for pp in (0, 1)}
    plain = build_model(tiny_args(**dict(settings, checkpoint_activations=False)))
    faults = []
    if not isinstance(models[0], GPT2ModelSequential) or not isinstance(models[1], GPT2ModelPipe):
        faults.append("pipe_parallel_size chose the wrong form")
    results = [_gradients(models[0], args[0]), _gradients(models[1], args[1]), _gradients(plain, args[0])]
    for logits, gradients in results[1:]:
        if not torch.equal(logits, results[0][0]):
            faults.append("logits differ between the forms")
        if gradients.keys() != results[0][1].keys():
            faults.append("the forms have other parameters")
        # The sum behind a bias gradient can run in another order where a checkpoint ends.
        allowed = 1e-6 if args[0].checkpoint_activations else 0.0
        faults += [key for key, grad in gradients.items() if (grad - results[0][1][key]).abs().max() > allowed]
    if [index for index, _ in models[0].local_layers()] != [index for index, _ in models[1].local_layers()]:
        faults.append("local_layers differ")
    return [f"{name}: {fault}" for fault in faults]


def _all_forms(rank, world_size):
    return [fault for name in FORMS for fault in _faults_of_one_form(name)]


def test_pipeline_and_sequential_form_are_equal(tmp_path):
    (faults,) = run_distributed(1, _all_forms, tmp_path=tmp_path)
    assert not faults, faults


def _gathered_logits(rank, world_size):
    """Shapes with split and gathered logits, and whether all ranks gathered the same, for both heads and forms."""
    results = []
    for tied in (False, True):
        for pp in (0, 1):
            args = tiny_args(
                **GQA_TP4, no_weight_tying=not tied, model_parallel_size=2, pipe_parallel_size=pp, global_num_gpus=2
            )
            initialize_megatron(args)
            model = build_model(args).eval()
            with torch.no_grad():
                split = model(batch()[0])
                model.set_parallel_output(False)
                gathered = model(batch()[0])
                joined = mpu.gather_from_model_parallel_region(split)
            results.append((tuple(split.shape), tuple(gathered.shape), torch.equal(gathered, joined)))
    return results


def test_set_parallel_output_gathers_the_logits(tmp_path):
    for results in run_distributed(2, _gathered_logits, tmp_path=tmp_path):
        assert results == [((2, 16, 64), (2, 16, 128), True)] * 4


def _checkpointing_keeps_less(rank, world_size):
    """Elements that autograd keeps between forward and backward, with and without activation checkpointing."""
    kept = []
    for checkpointed in (False, True):
        for pp in (0, 1):
            args = tiny_args(
                **WIDE_NON_DIVISIBLE,
                num_layers=4,
                checkpoint_activations=checkpointed,
                pipe_parallel_size=pp,
                global_num_gpus=1,
            )
            initialize_megatron(args)
            model, sizes = build_model(args), []
            keep = lambda tensor: sizes.append(tensor.numel()) or tensor  # noqa: B023, E731
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model(batch()[0])
            kept.append(sum(sizes))
    return kept


def test_activation_checkpointing_keeps_fewer_activations(tmp_path):
    (kept,) = run_distributed(1, _checkpointing_keeps_less, tmp_path=tmp_path)
    assert kept[2] < kept[0] / 4 and kept[3] < kept[1] / 4, kept


def _dropped(rank, world_size):
    """Attention with dropout on the same numbers, twice, and hidden dropout on pieces of the sequence."""
    args = tiny_args(**GQA_TP4, model_parallel_size=2, global_num_gpus=2, sequence_parallel=True, hidden_dropout=0.5)
    initialize_megatron(args)
    ones = torch.ones(5, 2, 3, 4)
    attended = [
        eager.attend(ones, ones, ones, scale=0.5, causal_offset=0, dropout_p=0.5, training=True).numpy()
        for _ in range(2)
    ]
    layer = ParallelTransformerLayerPipe(args, 0)
    return [*attended, layer._bias_norm_dropout(torch.ones(5, 2, 8), None).numpy()]


def test_ranks_drop_different_elements_of_what_is_split(tmp_path):
    first, second = run_distributed(2, _dropped, tmp_path=tmp_path)
    for mine, other in zip(first, second, strict=True):
        assert (mine != other).any()
    assert (first[0] != first[1]).any()
