"""Transformer Engine 1.12's compiled kernels, restated in torch operations for the CPU.

Semantics as in the C++ sources of that release (transformer_engine/pytorch/csrc). Sums run in fp32, as on the GPU.
Everything that TE's Python does around the kernels is TE's own code: see tests.helpers.te_standin.
"""

import torch
import torch.nn.functional as F

CALLS = {}
"""Kernel -> how often it ran. A test reads it to know that TE's path was taken."""

KERNELS = {}
"""Name in `transformer_engine_torch` -> function."""

OPERATORS = {}
"""Schema in torch.ops.tex_ts -> function."""


def _counted(function, name=None):
    name = name or function.__name__

    def kernel(*args, **kwargs):
        CALLS[name] = CALLS.get(name, 0) + 1
        return function(*args, **kwargs)

    return kernel


def kernel(function):
    """A function of the module transformer_engine_torch."""
    KERNELS[function.__name__] = _counted(function)
    return function


def operator(schema):
    """A function of torch.ops.tex_ts."""

    def register(function):
        OPERATORS[schema] = _counted(function)
        return function

    return register


# ------------------------------------------------------------------------------------------------ matrix products


@operator(
    "te_gemm_ts(Tensor A, Tensor A_si, int A_i, int A_t, int transa, Tensor B, Tensor B_si, int B_i, int B_t, "
    "int transb, Tensor(a!) D, Tensor D_scale, int D_t, Tensor D_amax, Tensor(b!) bias, int bias_t, "
    "Tensor(c!) pre_gelu, int grad, Tensor ws, int ws_size, int accumulate, int split) -> Tensor(a!)"
)
def te_gemm_ts(*args):
    """D = op(B) @ op(A), row major, with cuBLAS's epilogues: bias, gelu, dgelu, bias gradient, accumulation."""
    a, transposed_a, b, transposed_b, out = args[0], args[4], args[5], args[9], args[10]
    bias, pre_gelu, grad, accumulate = args[14], args[16], args[17], args[20]
    product = (b.t() if transposed_b else b).float() @ (a.t() if transposed_a else a).float()
    if grad:
        if pre_gelu.numel():
            product = _vector_jacobian(_gelu, pre_gelu, product)
        if bias.numel():
            bias.copy_(b.float().sum(0))
    else:
        if bias.numel():
            product = product + bias.float()
        if pre_gelu.numel():
            pre_gelu.copy_(product)
            product = _gelu(product)
    out.copy_(out.float() + product if accumulate else product)
    return out


# ----------------------------------------------------------------------------------------------------- activations


def _gelu(x):
    return F.gelu(x, approximate="tanh")


def _vector_jacobian(function, x, gradient):
    with torch.enable_grad():
        x = x.detach().float().requires_grad_()
        return torch.autograd.grad(function(x), x, gradient.float())[0]


def _gated(function):
    """The kernels' order: the first half of the columns is activated, the second half multiplies."""

    def apply(x):
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return apply


def _register_activation(name, function):
    def forward(x, scale, amax, scale_inv, scale_offset, otype):
        return function(x.float()).to(x.dtype)

    def backward(gradient, x, otype):
        return _vector_jacobian(function, x, gradient).to(gradient.dtype)

    schema = f"{name}_ts(Tensor x, Tensor scale, Tensor amax, Tensor scale_inv, int offset, int otype) -> Tensor"
    OPERATORS[schema] = _counted(forward, f"{name}_ts")
    KERNELS[f"d{name}"] = _counted(backward, f"d{name}")


def _quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x):
    return F.relu(x).square()


for _name, _function in (("gelu", _gelu), ("relu", F.relu), ("qgelu", _quick_gelu), ("srelu", _squared_relu)):
    _register_activation(_name, _function)
for _name, _function in (("geglu", _gelu), ("reglu", F.relu), ("swiglu", F.silu)):
    _register_activation(_name, _gated(_function))


# ----------------------------------------------------------------------------------------------------------- norms


def _gamma(weight, zero_centered):
    return weight.float() + 1 if zero_centered else weight.float()


@kernel
def layernorm_fwd_noalloc(x, weight, bias, out, eps, sm_margin, zero_centered):
    values = x.float()
    mean = values.mean(-1)
    rsigma = torch.rsqrt(values.var(-1, unbiased=False) + eps)
    normed = (values - mean[..., None]) * rsigma[..., None]
    out.copy_(normed * _gamma(weight, zero_centered) + bias.float())
    return [out, mean, rsigma]


@kernel
def layernorm_fwd(x, weight, bias, eps, sm_margin, zero_centered):
    return layernorm_fwd_noalloc(x, weight, bias, torch.empty_like(x), eps, sm_margin, zero_centered)


@operator("layernorm_fwd_inf_ts(Tensor x, Tensor w, Tensor b, float eps, int sm, bool zc) -> Tensor")
def layernorm_fwd_inf(x, weight, bias, eps, sm_margin, zero_centered):
    return layernorm_fwd(x, weight, bias, eps, sm_margin, zero_centered)[0]


@kernel
def layernorm_bwd(dz, x, mean, rsigma, weight, sm_margin, zero_centered):
    normed = (x.float() - mean[..., None]) * rsigma[..., None]
    gradient = dz.float()
    g = gradient * _gamma(weight, zero_centered)
    dx = rsigma[..., None] * (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True))
    dweight = (gradient * normed).flatten(0, -2).sum(0)
    dbias = gradient.flatten(0, -2).sum(0)
    return [dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)]


@kernel
def rmsnorm_fwd_noalloc(x, weight, out, eps, sm_margin, zero_centered):
    values = x.float()
    rsigma = torch.rsqrt(values.square().mean(-1) + eps)
    out.copy_(values * rsigma[..., None] * _gamma(weight, zero_centered))
    return [out, rsigma]


@kernel
def rmsnorm_fwd(x, weight, eps, sm_margin, zero_centered):
    return rmsnorm_fwd_noalloc(x, weight, torch.empty_like(x), eps, sm_margin, zero_centered)


@operator("rmsnorm_fwd_inf_ts(Tensor x, Tensor w, float eps, int sm, bool zc) -> Tensor")
def rmsnorm_fwd_inf(x, weight, eps, sm_margin, zero_centered):
    return rmsnorm_fwd(x, weight, eps, sm_margin, zero_centered)[0]


@kernel
def rmsnorm_bwd(dz, x, rsigma, weight, sm_margin, zero_centered):
    normed = x.float() * rsigma[..., None]
    gradient = dz.float()
    g = gradient * _gamma(weight, zero_centered)
    dx = rsigma[..., None] * (g - normed * (g * normed).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)]


# --------------------------------------------------------------------------------------------------------- softmax


def _softmax(x, scale, mask=None):
    scores = x.float() * float(scale)
    if mask is None:
        return torch.softmax(scores, -1).to(x.dtype)
    weights = torch.softmax(scores.masked_fill(mask, float("-inf")), -1)
    return weights.masked_fill(mask.all(-1, keepdim=True), 0).to(x.dtype)


def _causal(x):
    """The kernels' mask where there are more keys than queries: the last query sees all."""
    queries, keys = x.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)


@kernel
def scaled_softmax_forward(x, scale):
    return _softmax(x, scale)


@kernel
def scaled_masked_softmax_forward(x, mask, scale):
    return _softmax(x, scale, mask.bool())


@kernel
def scaled_aligned_causal_masked_softmax_forward(x, scale):
    return _softmax(x, scale, _causal(x))


@kernel
def scaled_upper_triang_masked_softmax_forward(x, scale):
    return _softmax(x, scale, _causal(x))


@kernel
def scaled_softmax_backward(dy, y, scale):
    weights, gradient = y.float(), dy.float()
    inner = (gradient * weights).sum(-1, keepdim=True)
    return (float(scale) * weights * (gradient - inner)).to(dy.dtype)


for _name in ("masked", "aligned_causal_masked", "upper_triang_masked"):
    _name = f"scaled_{_name}_softmax_backward"
    KERNELS[_name] = _counted(scaled_softmax_backward, _name)


# ------------------------------------------------------------------------------- rotary embedding, flash's layouts


def _rotate(t, cos, sin, sign):
    """t [s, b, n, d]; the first r = cos.shape[-1] channels are turned in halves, the others copied."""
    r = cos.shape[-1]
    turned, rest = t[..., :r].float(), t[..., r:]
    a, b = turned.chunk(2, -1)
    partner = torch.cat((-b, a), -1) if sign > 0 else torch.cat((b, -a), -1)
    return torch.cat(((turned * cos + partner * sin).to(t.dtype), rest), -1)


def _in_memory_order(t, transposed):
    return t.transpose(0, 1).contiguous().transpose(0, 1) if transposed else t


@kernel
def fused_rope_forward(t, freqs, transpose_output_memory):
    angles = freqs[: t.shape[0]]
    return _in_memory_order(_rotate(t, angles.cos(), angles.sin(), 1), transpose_output_memory)


@kernel
def fused_rope_backward(gradient, freqs, transpose_output_memory):
    angles = freqs[: gradient.shape[0]]
    low, high = angles.sin().chunk(2, -1)
    sin_of_partner = torch.cat((high, low), -1)
    return _in_memory_order(_rotate(gradient, angles.cos(), sin_of_partner, -1), transpose_output_memory)


@kernel
def fa_prepare_fwd(qkvi):
    """The query's view [s, b, n, 3h] of a fused projection -> [3, b, s, n, h]."""
    s, b, n, h = qkvi.shape
    strides = (b * n * 3 * h, n * 3 * h, 3 * h, h, 1)
    return torch.as_strided(qkvi, (s, b, n, 3, h), strides, qkvi.storage_offset()).permute(3, 1, 0, 2, 4).contiguous()


@kernel
def fa_prepare_bwd(q, k, v):
    return torch.stack((q, k, v), 3).permute(1, 0, 2, 3, 4).flatten(3).contiguous()
