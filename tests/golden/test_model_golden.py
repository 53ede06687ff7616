"""The model equals GPT-NeoX: logits, loss and every gradient, from GPT-NeoX's own checkpoints."""

import torch

from megatron import mpu
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model, cross_entropy
from tests.golden import cases
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import FORWARD, LOSS

RELATIVE_GRADIENT_NORM = 1e-4


def run(args, case, tp, rank):
    """(logits [2, seq, v], loss, {layer_NN.name: parameter with gradient})."""
    initialize_megatron(args)
    model = build_model(args)
    cases.load(model, case, tp, rank)
    tokens, labels = cases.tokens_and_labels(case)
    logits = model((tokens, torch.arange(tokens.shape[1]).expand_as(tokens)))
    loss = cross_entropy(args)(logits, (labels, torch.ones(labels.shape)))
    loss.backward()
    parameters = {
        f"layer_{index:02d}.{name}": parameter
        for index, layer in model.local_layers()
        if isinstance(layer, torch.nn.Module)
        for name, parameter in layer.named_parameters()
    }
    return mpu.gather_from_model_parallel_region(logits.detach()), loss.item(), parameters


def _faults(case, tp, pp, rank):
    """Everything in which one case at one layout differs from GPT-NeoX."""
    logits, loss, parameters = run(cases.arguments(case, tp, pp, global_num_gpus=tp), case, tp, rank)
    golden_logits, golden_loss, golden_gradients = cases.expected(case, tp, rank)
    faults = []
    difference = (logits[:, ::4] - golden_logits).abs().max().item()
    if not difference <= FORWARD[torch.float32]:
        faults.append(f"logits differ by {difference:.2g}")
    if not abs(loss - golden_loss) <= LOSS:
        faults.append(f"loss {loss} is not {golden_loss}")
    if set(parameters) != set(golden_gradients):
        faults.append(f"other parameters: {sorted(set(parameters) ^ set(golden_gradients))}")
    for name in set(parameters) & set(golden_gradients):
        faults += _gradient_faults(name, parameters[name], golden_gradients[name])
    return [f"{case} tp{tp} pp{pp} rank {rank}: {fault}" for fault in faults]


def _gradient_faults(name, parameter, golden):
    if list(parameter.shape) != golden["shape"]:
        return [f"{name} has shape {list(parameter.shape)}, not {golden['shape']}"]
    norm, total = parameter.grad.double().norm().item(), parameter.grad.double().sum().item()
    allowed = RELATIVE_GRADIENT_NORM * golden["norm"]
    faults = []
    if not abs(norm - golden["norm"]) <= allowed:
        faults.append(f"{name} gradient norm {norm} is not {golden['norm']}")
    if not abs(total - golden["sum"]) <= allowed * parameter.numel() ** 0.5:
        faults.append(f"{name} gradient sum {total} is not {golden['sum']}")
    return faults


def _all_faults(rank, world_size, names):
    return [fault for case in names for pp in (0, 1) for fault in _faults(case, world_size, pp, rank)]


def test_one_rank_equals_gpt_neox(tmp_path):
    (faults,) = run_distributed(1, _all_faults, cases.TP1, tmp_path=tmp_path)
    assert not faults, "\n".join(faults)


def test_two_model_parallel_ranks_equal_gpt_neox(tmp_path):
    faults = sum(run_distributed(2, _all_faults, cases.TP2, tmp_path=tmp_path), [])
    assert not faults, "\n".join(faults)


def test_tp2_row_biases_of_case1_differ_and_sum_to_the_tp1_bias():
    """The golden data does hold what makes the sum over ranks matter."""
    whole = cases.layer_state("case1_pythia_mha", 1, 0, 2)["attention.dense.bias"]
    first, second = (cases.layer_state("case1_pythia_mha", 2, rank, 2)["attention.dense.bias"] for rank in (0, 1))
    assert (first - second).abs().max() > 0.01
    torch.testing.assert_close(first + second, whole)
