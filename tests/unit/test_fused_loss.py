"""The loss fused with the output layer against fp64, against the loss of whole logits, and what it holds in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron import costs, mpu
from megatron.costs.activations import Batch
from megatron.costs.memory import fused_loss_bytes
from megatron.errors import ConfigError
from megatron.model.gpt2_model import build_model, cross_entropy, masked_cross_entropy
from tests.helpers.allocations import peak_bytes
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import MHA, WIDE_NON_DIVISIBLE
from tests.helpers.model_runs import batch, disturb
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

TEXTS, LENGTH, WIDTH, VOCABULARY = 3, 7, 40, 53
TOKENS = TEXTS * LENGTH
TIED = dict(WIDE_NON_DIVISIBLE, no_weight_tying=False, final_logit_softcap=2.0)
UNTIED = dict(MHA, use_bias_in_output_layer=True, checkpoint_activations=True, checkpoint_num_layers=1)


def _problem(dtype):
    """hidden, weight and bias, which take gradients, and (labels, loss_mask) with masked, ignored and part weights."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TEXTS, LENGTH, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.4
    bias = torch.randn(VOCABULARY, generator=generator)
    labels = torch.randint(0, VOCABULARY, (TEXTS, LENGTH), generator=generator)
    mask = (torch.rand(TEXTS, LENGTH, generator=generator) > 0.3).float()
    labels[0, 1] = labels[2, 6] = -100
    labels[1, :2] = torch.tensor([0, VOCABULARY - 1])
    mask[0, :2], mask[1] = 1.0, 0.5
    return [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)], (labels, mask)


def _truth(tensors, targets, cap):
    """Loss and gradients of the loss times the number of tokens, in fp64."""
    tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    logits = F.linear(*tensors)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    labels, mask = targets
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()
    loss = losses.sum() / mask.double().sum()
    (loss * TOKENS).backward()
    return loss.detach(), [tensor.grad for tensor in tensors]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_those_of_fp64(dtype, chunk, cap):
    tensors, targets = _problem(dtype)
    wanted, gradients = _truth(tensors, targets, cap)
    before = [tensor.detach().clone() for tensor in tensors]
    fused = mpu.FusedLinearCrossEntropy(chunk, cap)
    loss = fused(*tensors, targets)
    (loss * TOKENS).backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - wanted.item()) <= FORWARD[dtype] / (1 if dtype == torch.float32 else 4)
    for tensor, same, gradient, name in zip(tensors, before, gradients, ("hidden", "weight", "bias"), strict=True):
        assert tensor.grad.dtype == dtype and gradient.abs().max() > 0.5, "nothing to compare"
        assert_close(tensor.grad, gradient.to(dtype), GRADIENT, name)
        assert torch.equal(tensor.detach(), same), f"{name} was changed"
    with torch.no_grad():
        assert torch.equal(fused(*tensors, targets), loss)


@pytest.mark.parametrize("frozen", range(3))
def test_what_is_frozen_gets_no_gradient(frozen):
    tensors, targets = _problem(torch.float32)
    _, gradients = _truth(tensors, targets, None)
    tensors[frozen].requires_grad_(False)
    (mpu.FusedLinearCrossEntropy(4)(*tensors, targets) * TOKENS).backward()
    for number, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        assert tensor.grad is None if number == frozen else torch.allclose(tensor.grad.double(), gradient, atol=1e-4)


def test_small_probabilities_survive_in_fp16():
    """1 / vocabulary / tokens is below fp16's least number; only a loss scale lifts gradients into its range."""
    tokens, vocabulary, scale = 2048, 8192, 2.0**14
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, tokens, 16, generator=generator).half().requires_grad_()
    weight = (torch.randn(vocabulary, 16, generator=generator) * 0.1).half().requires_grad_()
    labels, mask = torch.zeros(1, tokens, dtype=torch.int64), torch.ones(1, tokens)
    (mpu.FusedLinearCrossEntropy(512)(hidden, weight, None, (labels, mask)) * scale).backward()
    exact = weight.detach().double().requires_grad_()
    (F.cross_entropy((hidden.detach().double() @ exact.T)[0], labels[0]) * scale).backward()
    unlikely = slice(1, None)  # rows of the weight whose gradient is made of small probabilities alone
    error = (weight.grad.double() - exact.grad)[unlikely].abs().max() / exact.grad[unlikely].abs().max()
    assert error < GRADIENT[torch.float16]


@pytest.mark.parametrize("factor", [1.0, 2.0**16])
def test_without_a_token_that_counts_the_loss_and_its_gradients_are_0(factor):
    tensors, (labels, _) = _problem(torch.float32)
    targets = labels.clamp(min=0), torch.zeros(TEXTS, LENGTH)
    for loss in (mpu.FusedLinearCrossEntropy(4)(*tensors, targets), masked_cross_entropy(F.linear(*tensors), targets)):
        gradients = torch.autograd.grad(loss * factor, tensors)
        assert loss.item() == 0.0
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


def test_a_label_outside_the_vocabulary_fails():
    tensors, (labels, mask) = _problem(torch.float32)
    for label in (VOCABULARY, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            mpu.FusedLinearCrossEntropy(4)(*tensors, (labels.fill_(label), mask))


def _model(settings, **more):
    args = tiny_args(**settings, **more)
    model = build_model(args)
    disturb(model, args)
    return args, model


@pytest.mark.parametrize("settings", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
def test_a_model_that_is_given_targets_returns_the_same_loss(settings, precision):
    inputs, targets = batch()
    args, whole = _model(settings, precision=precision)
    _, fused = _model(settings, precision=precision, fused_loss_chunk=5)
    wanted = cross_entropy(args)(whole(inputs), targets)
    assert torch.equal(whole(inputs, targets), wanted)
    loss = fused(inputs, targets)
    assert_close(loss.to(args.params_dtype), wanted.to(args.params_dtype), what="loss")
    for each in (loss, wanted):
        (each * targets[0].numel()).backward()
    pairs = zip(fused.named_parameters(), whole.named_parameters(), strict=True)
    for (name, parameter), (its_name, other) in pairs:
        assert name == its_name and parameter.shape == other.shape
        limit = GRADIENT[args.params_dtype] * max(1.0, other.grad.abs().max().item())
        difference = (parameter.grad - other.grad).abs().max().item()
        assert difference <= limit, f"{name}: {difference:.2g}"
    with torch.no_grad():
        assert torch.equal(fused(inputs), whole(inputs))


class _Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation has returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in tree_leaves(result)
                 if torch.is_tensor(tensor)]  # fmt: skip
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("tied", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_is_made(tied):
    long = dict(WIDE_NON_DIVISIBLE, seq_length=512, max_position_embeddings=512, padded_vocab_size=1024, num_layers=1)
    tokens = torch.randint(0, 1024, (2, 513), generator=torch.Generator().manual_seed(0))
    inputs = tokens[:, :-1], torch.arange(512).expand(2, -1)
    largest = {}
    for chunk in (None, 64):
        _, model = _model(long, no_weight_tying=not tied, fused_loss_chunk=chunk, attention_config=["flash"])
        with _Largest() as seen:
            model(inputs, (tokens[:, 1:], torch.ones(2, 512))).backward()
        largest[chunk] = seen.elements
    assert largest[None] >= 1024 * 1024
    assert largest[64] <= 1024 * 1024 // 3


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("chunk", [64, 10000])
@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
def test_the_estimate_of_its_memory(precision, chunk, cap):
    args = tiny_args(
        hidden_size=64, num_attention_heads=4, precision=precision, fused_loss_chunk=chunk, final_logit_softcap=cap,
        padded_vocab_size=20480, seq_length=256, max_position_embeddings=256,
    )  # fmt: skip
    hidden = torch.randn(2, 256, 64).to(args.params_dtype).requires_grad_()
    weight = (torch.randn(20480, 64) * 0.1).to(args.params_dtype).requires_grad_()
    targets = torch.zeros(2, 256, dtype=torch.int64), torch.ones(2, 256)
    fused = mpu.FusedLinearCrossEntropy(chunk, cap)
    measured = peak_bytes(lambda: fused(hidden, weight, None, targets).backward())
    assert fused_loss_bytes(args, Batch.of(args, "cpu")) == pytest.approx(measured, rel=0.1)


def test_the_estimate_of_a_whole_step_has_the_fused_loss():
    settings = dict(padded_vocab_size=151936, seq_length=512, max_position_embeddings=512, precision="bfloat16")
    whole, fused = (
        costs.memory_per_rank(tiny_args(**settings, fused_loss_chunk=chunk), device="cpu") for chunk in (None, 256)
    )
    assert fused.logits < whole.logits / 5
    assert whole.total - fused.total > 0.5 * (whole.logits - fused.logits)


@pytest.mark.parametrize(
    "settings, problem",
    [
        (dict(fused_loss_chunk=0), "fused_loss_chunk=0 must be greater than 0"),
        (dict(fused_loss_chunk=64, precision="fp16", fp16_lm_cross_entropy=True), "fp16_lm_cross_entropy=True"),
        (dict(fused_loss_chunk=64, te_columnparallel=True), "te_columnparallel=True"),
        (dict(fused_loss_chunk="many"), "fused_loss_chunk='many'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        tiny_args(**settings)
