"""What the small modules of neox_patch_attention_texts need to run on a CPU, and how to build one."""

import sys
import types
from types import SimpleNamespace
from typing import Any, Dict, Optional

import pytest
import torch

from tests.helpers.neox_patch_arguments import load_placed


class Linear(torch.nn.Module):
    """A linear layer with the arguments of a parallel one."""

    def __init__(self, neox_args, input_size, output_size, bias=True, skip_bias_add=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(output_size, input_size))
        self.bias = torch.nn.Parameter(torch.zeros(output_size)) if bias else None
        self.skip_bias_add = skip_bias_add

    def forward(self, x):
        if self.skip_bias_add:
            return torch.nn.functional.linear(x, self.weight), self.bias
        return torch.nn.functional.linear(x, self.weight, self.bias), None


class FlashCalls:
    """Flash attention for [b, s, n, d]: its default scale is that of the width, and keys may be fewer than queries."""

    def __init__(self) -> None:
        self.scales: list = []

    def training(self, q, k, v, dropout_p=0.0, softmax_scale: Optional[float] = None, causal: bool = False):
        assert causal and dropout_p == 0.0 and q.shape[-1] == k.shape[-1] and k.shape == v.shape
        self.scales.append(softmax_scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale)
        return attended.transpose(1, 2)

    def generating(self, q, k, v, softmax_scale: Optional[float] = None, causal: bool = False):
        return self.training(q, k, v, 0.0, softmax_scale, causal)


def turned(x, dims, base, start):
    """x [s, b, n, d] by the angles of positions start, start + 1, ..."""
    if not dims:
        return x
    frequencies = base ** (-torch.arange(0, dims, 2).double() / dims)
    angles = torch.outer(torch.arange(start, start + len(x)).double(), frequencies)[:, None, None]
    one, two = x[..., : dims // 2], x[..., dims // 2 : dims]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([one * cos - two * sin, two * cos + one * sin, x[..., dims:]], dim=-1)


def settings(**overrides: Any) -> SimpleNamespace:
    """An arguments object with what attention reads, of GPT-NeoX and of the patch."""
    values = dict(
        num_kv_heads=None,
        head_dim=None,
        softmax_scale=None,
        qk_norm_type=None,
        use_qk_layernorm=False,
        norm="rmsnorm",
        rms_norm_epsilon=1e-2,
        layernorm_epsilon=2e-2,
        rmsnorm_fusion=False,
        zero_centered_gamma=False,
        pos_emb="rotary",
        rotary_pct=1.0,
        rotary_emb_base=10000,
        use_bias_in_attn_linear=True,
        apply_query_key_layer_scaling=False,
        use_mup=False,
        sequence_parallel=False,
        attention_config=["global"] * 4,
    )
    return SimpleNamespace(**{**values, **overrides})


def attention_class(monkeypatch: pytest.MonkeyPatch, text: str, calls: Optional[FlashCalls] = None) -> type:
    """The class of a text, beside the files that are placed in the checkout."""
    load_placed(monkeypatch, "qk_norm")
    parts, calls = types.ModuleType("small_parts"), calls or FlashCalls()
    parts.Linear, parts.turned = Linear, turned
    parts.flash, parts.flash_of_rows = calls.training, calls.generating
    monkeypatch.setitem(sys.modules, "small_parts", parts)
    names: Dict[str, Any] = {"__name__": "patched"}
    exec(compile(text, "patched", "exec"), names)
    return names["ParallelSelfAttention"]


def build(kind: type, args: SimpleNamespace, **more: Any) -> torch.nn.Module:
    """An attention with weights of order 0.1, those of norms around 1."""
    attention = kind(args, **more)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            around = 1.0 if "layernorm" in name and not name.endswith("bias") else 0.0
            parameter.copy_(around + 0.1 * torch.randn(parameter.shape, generator=generator))
    return attention
