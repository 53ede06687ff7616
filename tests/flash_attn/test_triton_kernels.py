"""The package from its Python function down to its Triton kernels, interpreted, against the fp64 reference.

These are not the CUDA kernels. bfloat16 is left out: Triton's interpreter computes it wrongly.
"""

import pytest
import torch

from megatron.model.attention import ParallelSelfAttention
from tests.flash_attn.comparison import GQA, MHA, MORE_KEY_HEADS, MQA, compare
from tests.flash_attn.environment import skip_module_without_package
from tests.helpers.attention_reference import AttentionFunction, value_and_gradients
from tests.helpers.configs import tiny_args
from tests.helpers.geometries import WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, GRADIENT, assert_close

skip_module_without_package()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:triton")

WIDTHS = (8, 24, 64, 80, 128, 256)


@pytest.mark.parametrize("heads", (MHA, GQA, MQA), ids=("mha", "gqa", "mqa"))
@pytest.mark.parametrize("width", WIDTHS)
def test_causal_attention_in_fp32(width, heads, triton_kernels):
    compare(heads, width, torch.float32)


@pytest.mark.parametrize("width", WIDTHS)
def test_causal_attention_in_fp16(width, triton_kernels):
    compare(GQA, width, torch.float16)


@pytest.mark.parametrize("width", (12, 30))
@pytest.mark.parametrize("heads", (GQA, MORE_KEY_HEADS), ids=("gqa", "more_key_heads"))
def test_padded_widths_keep_their_own_scale(width, heads, triton_kernels):
    compare(heads, width, torch.float32)


@pytest.mark.parametrize("scale", (0.05, 0.7))
def test_softmax_scale(scale, triton_kernels):
    compare(GQA, 24, torch.float32, scale=scale)


@pytest.mark.parametrize("heads", (MHA, GQA, MQA), ids=("mha", "gqa", "mqa"))
@pytest.mark.parametrize("queries, keys", ((1, 23), (7, 23), (22, 23)))
def test_the_last_queries_see_all_the_keys_before_them(queries, keys, heads, triton_kernels):
    compare(heads, 24, torch.float32, queries, keys)


@pytest.mark.parametrize("queries, keys", ((150, 150), (70, 150)))
def test_more_than_one_block_of_the_kernels(queries, keys, triton_kernels):
    compare((2, 1, 1), 24, torch.float32, queries, keys)


def test_a_layer_of_the_model(triton_kernels):
    args = tiny_args(**WIDE_NON_DIVISIBLE, rotary_pct=0.5, attention_config=["flash"] * 2)
    attention = ParallelSelfAttention(args, layer_number=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    hidden = torch.randn(11, 2, 80, generator=generator).requires_grad_()
    upstream = torch.randn(11, 2, 80, generator=generator)
    parameters = {name: parameter.detach() for name, parameter in attention.named_parameters()}
    function = AttentionFunction(heads=6, kv_heads=2, head_dim=24, rotary_ndims=12)
    wanted, gradients = value_and_gradients(parameters, hidden.detach(), function, upstream)

    output, bias = attention(hidden)
    (output + bias).backward(upstream)
    assert_close(output + bias, wanted, FORWARD)
    for name, x in (("input", hidden), *attention.named_parameters()):
        assert_close(x.grad, gradients[name], GRADIENT, name)


@pytest.mark.parametrize("setting", (dict(window=5), dict(softcap=1.5)), ids=str)
def test_why_these_kernels_do_not_count_as_usable(setting, triton_kernels):
    with pytest.raises(AssertionError, match="largest difference"):
        compare(GQA, 24, torch.float32, **setting)
