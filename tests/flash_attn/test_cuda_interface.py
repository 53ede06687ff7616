"""What our settings become in a call of the package's CUDA library: window, soft cap, scale, dropout, padding.

The library is a stand-in that follows the package's documentation; the Python between us and it is the package's.
"""

import pytest
import torch

from megatron.geometry import HeadGeometry
from megatron.model.attention.core import AttentionRequest, flash, flash_package
from tests.flash_attn.comparison import BATCH, GQA, MHA, MORE_KEY_HEADS, MQA, compare
from tests.flash_attn.environment import skip_module_without_package

skip_module_without_package()
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:triton")

HALF = (torch.float16, torch.bfloat16)


@pytest.fixture
def library(cuda_library, monkeypatch):
    """The stand-in, where tensors on the CPU count as on CUDA."""
    real = flash_package.is_usable
    monkeypatch.setattr(flash_package, "is_usable", lambda device, dtype: real("cuda", dtype))
    return cuda_library


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("queries, keys", ((19, 19), (1, 23), (7, 23)))
@pytest.mark.parametrize("window", (None, 1, 5, 18, 40))
@pytest.mark.parametrize("softcap", (None, 1.5))
def test_window_and_soft_cap(softcap, window, queries, keys, dtype, library):
    compare(GQA, 24, dtype, queries, keys, window=window, softcap=softcap)
    assert len(library.calls) == 1


@pytest.mark.parametrize("heads", (MHA, GQA, MQA, MORE_KEY_HEADS), ids=str)
@pytest.mark.parametrize("width", (8, 12, 30, 80, 256))
def test_heads_and_widths(width, heads, library):
    compare(heads, width, torch.bfloat16, scale=0.3)
    padded = -(-width // 8) * 8
    (call,) = library.calls
    assert call["shape"] == (BATCH, 19, heads[0], padded) and call["key_shape"] == (BATCH, 19, heads[1], padded)


@pytest.mark.parametrize("training, dropout_p", ((True, 0.25), (False, 0.0)))
def test_dropout_is_for_training(training, dropout_p, library):
    q = torch.zeros(3, 1, 2, 8, dtype=torch.float16)
    flash.attend(q, q, q, scale=1.0, causal_offset=0, dropout_p=0.25, training=training)
    assert [call["dropout_p"] for call in library.calls] == [dropout_p]


def _request(width=24, device="cuda", dtype=torch.bfloat16, **settings):
    numbers = dict(hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=width)
    return AttentionRequest(HeadGeometry.from_config(**numbers), dtype, torch.device(device), **settings)


@pytest.mark.parametrize(
    "settings, reason",
    (
        (dict(), None),
        (dict(width=256, dtype=torch.float16), None),
        (dict(width=30, window=7, softcap=50.0), None),
        (dict(window=7, dropout_p=0.1), None),
        (dict(width=264), "head_dim=264"),
        (dict(softcap=50.0, dropout_p=0.1), "attn_logit_softcap=50.0 with attention_dropout=0.1"),
        (dict(dtype=torch.float32), "precision=fp32"),
        (dict(score_bias="pos_emb=alibi"), "pos_emb=alibi"),
        (dict(device="cpu", window=7), None),
        (dict(device="cpu", softcap=50.0), "attn_logit_softcap=50.0"),
    ),
    ids=str,
)
def test_what_can_run_with_the_cuda_library(settings, reason, cuda_library):
    answer = flash.refusal(_request(**settings))
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize(
    "settings, reason",
    (
        (dict(), None),
        (dict(window=7), "sliding_window_width=7"),
        (dict(softcap=50.0), "attn_logit_softcap=50.0"),
        (dict(device="cpu", window=7), None),
    ),
    ids=str,
)
def test_what_can_run_with_the_triton_kernels_alone(settings, reason, package):
    assert not any(flash_package.is_usable(device, dtype) for device in ("cuda", "cpu") for dtype in HALF)
    answer = flash.refusal(_request(**settings))
    assert answer is None if reason is None else reason in answer
