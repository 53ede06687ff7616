"""Figures of heads against the definitions, in fp64 with numpy and one head at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.head_diagnostics.circuits import circuit_figures, circuit_spectra
from megatron.head_diagnostics.gradients import gradient_figures, largest_ratio
from megatron.head_diagnostics.ranks import effective_rank, product_singular_values, singular_values
from megatron.head_diagnostics.scores import LayerSample, attention_weights, score_figures, similarities
from tests.helpers.geometries import GQA_TP4, MHA, MQA, NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import FORWARD, assert_close

TOKENS = 13
GEOMETRIES = {"wide": WIDE_NON_DIVISIBLE, "narrow": NARROW, "mha": MHA, "mqa": MQA, "gqa": GQA_TP4}
FUNCTIONS = {
    "plain": {},
    "window": dict(window=4),
    "capped": dict(softcap=2.0),
    "biased": dict(bias=True),
    "all": dict(window=5, softcap=3.0, bias=True, rotary_ndims=6),
}


def sample_of(geometry, function, k_heads=None):
    generator = torch.Generator().manual_seed(5)
    n, d = geometry["num_attention_heads"], geometry["head_dim"]
    m = geometry.get("num_kv_heads", n)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    sample = LayerSample(
        q=draw(TOKENS, n, d) * 2,
        k=draw(TOKENS, k_heads or m, d) * 2,
        v=draw(TOKENS, m, d),
        scale=d**-0.5,
        window=function.get("window"),
        softcap=function.get("softcap"),
        bias=draw(n, TOKENS, TOKENS) if function.get("bias") else None,
        rotary_ndims=function.get("rotary_ndims", 0),
    )
    return sample, draw(geometry["hidden_size"], n * d)


def rank_of(values):
    shares = values[values > 0] / values.sum()
    return np.exp(-(shares * np.log(shares)).sum())


def one_head(sample, output_weight, head):
    """Weights and figures of one head by loops over queries."""
    n = sample.q.shape[1]
    q = sample.q[:, head].double().numpy()
    k = sample.k[:, head * sample.k.shape[1] // n].double().numpy()
    v = sample.v[:, head * sample.v.shape[1] // n].double().numpy()
    weights, seen, entropies, shares = np.zeros((TOKENS, TOKENS)), [], [], []
    for i in range(TOKENS):
        first = 0 if sample.window is None else max(0, i - sample.window)
        scores = k[first : i + 1] @ q[i] * sample.scale
        if sample.bias is not None:
            scores = scores + sample.bias[head, i, first : i + 1].double().numpy()
        seen.extend(scores)
        if sample.softcap is not None:
            scores = sample.softcap * np.tanh(scores / sample.softcap)
        row = np.exp(scores) / np.exp(scores).sum()
        weights[i, first : i + 1] = row
        if len(row) > 1:
            entropies.append(-(row * np.log(row)).sum())
            shares.append(entropies[-1] / np.log(len(row)))
    to_first = [i for i in range(1, TOKENS) if sample.window is None or i <= sample.window]
    width = sample.q.shape[2]
    columns = output_weight[:, head * width : (head + 1) * width].double().numpy()
    products = np.linalg.svd(q @ k.T, compute_uv=False)[: min(TOKENS, width)]
    rotated = [np.square(x[:, : sample.rotary_ndims]).sum() / np.square(x).sum() for x in (q, k)]
    return weights, {
        "score_std": np.std(seen),
        "score_max": np.abs(seen).max(),
        "score_rank": rank_of(products),
        "entropy": np.mean(entropies),
        "entropy_share": np.mean(shares),
        "attention_rank": rank_of(np.linalg.svd(weights, compute_uv=False)),
        "first_token": weights[to_first, 0].mean(),
        "output_norm": np.linalg.norm(weights @ v @ columns.T, axis=-1).mean(),
        **({"rotary_share": np.mean(rotated)} if sample.rotary_ndims else {}),
    }


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_scores(geometry, function):
    sample, output_weight = sample_of(GEOMETRIES[geometry], FUNCTIONS[function])
    weights = attention_weights(sample)
    figures = score_figures(sample, weights, output_weight)
    for head in range(sample.q.shape[1]):
        expected_weights, expected = one_head(sample, output_weight, head)
        assert_close(weights[head], torch.from_numpy(expected_weights), FORWARD, f"weights of head {head}")
        assert {name: float(values[head]) for name, values in figures.items()} == pytest.approx(expected, rel=2e-5)


def test_only_pairs_that_turn_are_rotated():
    """rope_scaling of type proportional: of 12 dimensions the pairs (0, 6) and (1, 7)."""
    sample, output_weight = sample_of(WIDE_NON_DIVISIBLE, dict(rotary_ndims=12))
    sample = replace(sample, turning_pairs=2)
    shares = score_figures(sample, attention_weights(sample), output_weight)["rotary_share"]
    turning = [0, 1, 6, 7]
    for head in range(6):
        q, k = sample.q[:, head].double(), sample.k[:, head // 3].double()
        expected = [(x[:, turning].square().sum() / x.square().sum()).item() for x in (q, k)]
        assert shares[head].item() == pytest.approx(sum(expected) / 2, rel=2e-5)


def test_keys_of_the_joint_norm_have_a_head_for_each_query_head():
    sample, output_weight = sample_of(WIDE_NON_DIVISIBLE, {}, k_heads=6)
    weights = attention_weights(sample)
    for head in range(6):
        assert_close(weights[head], torch.from_numpy(one_head(sample, output_weight, head)[0]), FORWARD, str(head))


def test_one_token():
    sample, output_weight = sample_of(MHA, {})
    sample = LayerSample(sample.q[:1], sample.k[:1], sample.v[:1], sample.scale)
    figures = score_figures(sample, attention_weights(sample), output_weight)
    assert all(values.isfinite().all() and values.shape == (3,) for values in figures.values())
    assert figures["entropy"].tolist() == [0, 0, 0] and figures["first_token"].tolist() == [1, 1, 1]


def test_equal_heads_are_found_and_others_are_not():
    sample, _ = sample_of(MHA, {})
    q, k = sample.q.clone(), sample.k.clone()
    q[:, 2], k[:, 2] = q[:, 0], k[:, 0]
    alike = similarities(attention_weights(LayerSample(q, k, sample.v, sample.scale)))
    assert alike[0, 2] == pytest.approx(1, abs=1e-5) and alike[2, 0] == pytest.approx(1, abs=1e-5)
    assert alike[0, 1] < 0.9


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_circuits(geometry):
    geometry = GEOMETRIES[geometry]
    generator = torch.Generator().manual_seed(3)
    n, d, h = geometry["num_attention_heads"], geometry["head_dim"], geometry["hidden_size"]
    m = geometry.get("num_kv_heads", n)
    q, k, v = (torch.randn(heads, d, h, generator=generator) for heads in (n, m, m))
    out = torch.randn(h, n * d, generator=generator)
    spectra = circuit_spectra(q, k, v, out)
    figures = circuit_figures(spectra)
    for head in range(n):
        shared = head * m // n
        qk = q[head].double().numpy().T @ k[shared].double().numpy()
        ov = out[:, head * d : (head + 1) * d].double().numpy() @ v[shared].double().numpy()
        for name, product in (("qk", qk), ("ov", ov)):
            values = np.linalg.svd(product, compute_uv=False)[: min(d, h)]
            np.testing.assert_allclose(spectra[name][head], values, rtol=1e-4, atol=1e-3)
            assert float(figures[f"{name}_rank"][head]) == pytest.approx(rank_of(values), rel=1e-4)
            assert float(figures[f"{name}_norm"][head]) == pytest.approx(values[0], rel=1e-5)


def test_gradients_add_up_to_those_of_the_weights():
    n, m, d, h = 6, 2, 5, 7
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(heads, d, h, generator=generator) for heads in (n, m, m))
    out = torch.randn(h, n * d, generator=generator)
    norms = gradient_figures(q, k, v, out, 3)["gradient_norm"]
    assert float(norms.square().sum()) == pytest.approx(sum(float(x.square().sum()) for x in (q, k, v, out)), rel=1e-5)
    without = gradient_figures(q * 0, k * 0, v * 0, torch.cat([out[:, :d], out[:, d:] * 0], dim=1), 3)["gradient_norm"]
    assert without[0] == pytest.approx(float(out[:, :d].norm()), rel=1e-5) and without[1:].tolist() == [0] * 5
    shared = gradient_figures(q * 0, k, v * 0, out * 0, 3)["gradient_norm"]
    assert shared[:3].tolist() == pytest.approx([float(k[0].norm()) / 3**0.5] * 3, rel=1e-5)


def test_ratio_of_heads():
    assert largest_ratio(torch.tensor([1.0, 4.0, 2.0])) == 4
    assert largest_ratio(torch.tensor([1.0, 0.0])) == float("inf")


def test_effective_rank():
    assert float(effective_rank(torch.tensor([3.0, 3.0, 3.0, 0.0]))) == pytest.approx(3)
    assert float(effective_rank(torch.zeros(4))) == 0
    assert float(effective_rank(singular_values(torch.eye(9)))) == pytest.approx(9)


def test_what_is_not_finite_is_nan_and_nothing_else():
    """A decomposition of NaN would end a training run."""
    sample, output_weight = sample_of(MHA, {})
    right = score_figures(sample, attention_weights(sample), output_weight)
    sample.q[3, 1] = torch.nan
    broken = score_figures(sample, attention_weights(sample), output_weight)
    for name in ("attention_rank", "score_rank", "entropy", "score_max"):
        assert broken[name].isnan().tolist() == [False, True, False], name
        assert broken[name][::2].tolist() == right[name][::2].tolist(), name
    q = torch.randn(3, 16, 56)
    q[2, 0, 0] = torch.inf
    spectra = circuit_spectra(q, q, torch.randn(3, 16, 56), torch.randn(56, 48))
    assert spectra["qk"].isnan().all(-1).tolist() == [False, False, True] and not spectra["ov"].isnan().any()


def test_singular_values_of_a_product_that_is_not_made():
    left, right = torch.randn(3, 11, 4), torch.randn(3, 4, 9)
    expected = torch.linalg.svdvals(left.double() @ right.double())[..., :4]
    torch.testing.assert_close(product_singular_values(left, right).double(), expected, rtol=1e-5, atol=1e-5)
