"""The functions of the flash-attn package that GPT-NeoX calls, in plain torch: shapes, scale, masks, no dropout.

What it shows is that GPT-NeoX hands over the right tensors and the right scale; NVIDIA's kernels are not shown.
"""

import importlib.metadata
import sys
import types

VERSION = "2.6.3"


def install():
    """Make `import flash_attn` and its version work, for modules that are imported afterwards."""
    packages = {
        "flash_attn": {},
        "flash_attn.flash_attn_interface": dict(
            flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
        ),
        "flash_attn.flash_attn_triton": dict(flash_attn_func=triton_flash_attn_func),
    }
    for name, attributes in packages.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSION if name in ("flash-attn", "flash_attn") else installed(name)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None):
    """q [b, s, n, d], k and v [b, t, m, d] -> [b, s, n, d]."""
    assert dropout_p == 0.0
    s, t = q.shape[1], k.shape[1]
    ahead = _distance(s, t)
    bias = 0.0 if alibi_slopes is None else -alibi_slopes[:, None, None] * ahead.abs()
    hidden = (ahead > 0) if causal else (ahead > t)
    if window_size[0] >= 0:
        hidden = hidden | (ahead < -window_size[0])
    return _attend(q, k, v, softmax_scale, bias, hidden)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    **more,
):  # fmt: skip
    """Texts behind each other: q [total, n, d], k and v [total, m, d] -> [total, n, d]."""
    import torch

    ends = list(zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True))
    parts = []
    for (q_start, k_start), (q_end, k_end) in zip(ends[:-1], ends[1:], strict=True):
        assert q_end - q_start <= max_seqlen_q and k_end - k_start <= max_seqlen_k
        text = q[None, q_start:q_end], k[None, k_start:k_end], v[None, k_start:k_end]
        parts.append(flash_attn_func(*text, dropout_p, softmax_scale, causal, **more)[0])
    return torch.cat(parts)


def triton_flash_attn_func(q, k, v, bias=None, causal=False, softmax_scale=None):
    """The older interface, with a bias [b, n, s, t] on the scaled scores."""
    ahead = _distance(q.shape[1], k.shape[1])
    return _attend(q, k, v, softmax_scale, 0.0 if bias is None else bias, (ahead > 0) & causal)


def _distance(s, t):
    """[s, t]: how far a key is ahead of a query; the last of both are at one place."""
    import torch

    return torch.arange(t)[None, :] - (torch.arange(s)[:, None] + t - s)


def _attend(q, k, v, scale, bias, hidden):
    import torch

    k, v = (each.repeat_interleave(q.shape[2] // each.shape[2], 2) for each in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bsnd,btnd->bnst", q, k) * scale + bias
    return torch.einsum("bnst,btnd->bsnd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
