"""tools.head_dim inspect on a Hugging Face folder and on a checkpoint of two ranks made of it: the figures are those of
transformers' own attention weights and gradients. Wrong inputs are named."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.convert.importing import import_hf
from tests.helpers.evaluation import CONTEXT, TEXT, TOKENIZER, VOCAB, WIDTHS, hf_tokenizer, hf_twin, save_hf_twin
from tests.helpers.tolerances import FORWARD
from tools.head_dim.__main__ import main

HEADS, KV_HEADS, WIDTH = (WIDTHS[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
TOKENS = 40
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """text.txt, the folder hf, and tp2, a checkpoint of two ranks with layer files."""
    folder = tmp_path_factory.mktemp("inspect")
    hf = hf_twin()
    save_hf_twin(folder / "hf", hf)
    options = dict(model_parallel_size=2, pipe_parallel_size=1, make_vocab_size_divisible_by=VOCAB // 2)
    import_hf(str(folder / "hf"), str(folder / "tp2"), progress=False, **options)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def truth():
    """Of transformers: loss, attention weights [layers, n, s, s] and {name: gradient}."""
    hf = hf_twin()
    ids = torch.tensor([hf_tokenizer()(TEXT)["input_ids"][: TOKENS + 1]])
    out = hf(ids[:, :-1], output_attentions=True)
    loss = cross_entropy(out.logits[0], ids[0, 1:])
    loss.backward()
    weights = torch.stack([each[0].detach() for each in out.attentions]).double().numpy()
    return loss.item(), weights, {name: parameter.grad.double() for name, parameter in hf.named_parameters()}


def inspect(place, of, out, *options):
    status = main(["inspect", str(place / of), "--text", str(place / "text.txt"), "--out", str(out), *options])
    return status, json.loads((out / "head_diagnostics.json").read_text())


@pytest.mark.parametrize("of", ["hf", "tp2"])
def test_figures_are_those_of_transformers(place, truth, of, tmp_path, capsys):
    status, report = inspect(place, of, tmp_path, "--tokens", str(TOKENS), "--json")
    assert status == 0
    printed = json.loads(capsys.readouterr().out)  # nothing else is printed
    assert printed["layers"][1]["figures"] == report["layers"][1]["figures"]
    assert printed["layers"][1]["spectra"] == {} and len(report["layers"][1]["spectra"]["qk"][0]) == WIDTH
    loss, weights, gradients = truth
    assert report["loss"] == pytest.approx(loss, abs=FORWARD[torch.float32])
    assert report["tokens"] == TOKENS and [layer["layer"] for layer in report["layers"]] == [0, 1]
    for number, layer in enumerate(report["layers"]):
        figures = layer["figures"]
        logs = np.log(np.where(weights[number] > 0, weights[number], 1))
        entropy = -(weights[number] * logs).sum(-1)[:, 1:]
        np.testing.assert_allclose(figures["entropy"], entropy.mean(-1), rtol=1e-4)
        np.testing.assert_allclose(figures["first_token"], weights[number][:, 1:, 0].mean(-1), rtol=1e-4)
        ranks = [effective_rank(head) for head in weights[number]]
        np.testing.assert_allclose(figures["attention_rank"], ranks, rtol=1e-3)
        np.testing.assert_allclose(figures["gradient_norm"], gradient_norms(gradients, number), rtol=1e-3)


def effective_rank(matrix):
    values = np.linalg.svd(matrix, compute_uv=False)
    shares = values[values > 0] / values.sum()
    return math.exp(-(shares * np.log(shares)).sum())


def gradient_norms(gradients, layer):
    name = f"model.layers.{layer}.self_attn.{{}}_proj.weight"
    q, k, v, o = (gradients[name.format(part)] for part in "qkvo")
    per = HEADS // KV_HEADS
    norms = []
    for head in range(HEADS):
        own, shared = slice(head * WIDTH, (head + 1) * WIDTH), head // per
        rows = slice(shared * WIDTH, (shared + 1) * WIDTH)
        squares = q[own].square().sum() + o[:, own].square().sum()
        norms.append(float(squares + (k[rows].square().sum() + v[rows].square().sum()) / per) ** 0.5)
    return norms


def test_what_it_shows_and_writes(place, tmp_path, capsys):
    status, report = inspect(place, "tp2", tmp_path, "--no-gradients")
    shown = capsys.readouterr().out
    assert status == 0 and report["tokens"] == CONTEXT, "without --tokens a short model is read to its end"
    assert "gradient_norm" not in report["layers"][0]["figures"] and "gradient" not in shown
    assert f"{CONTEXT} tokens, loss {report['loss']:.4f}" in shown
    for layer in report["layers"]:
        (row,) = (line for line in shown.splitlines() if line.startswith(f"│ {layer['layer']} "))
        assert f"│ {np.mean(layer['figures']['attention_rank']):.3g} " in row
    for finding in report["findings"]:
        assert finding["rule"] in shown.replace("\n", " ")
    assert (tmp_path / "head_diagnostics.png").read_bytes()[:4] == PNG
    assert sorted(os.listdir(tmp_path)) == ["head_diagnostics.json", "head_diagnostics.png"]


def test_a_short_text_is_read_whole(place, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("The court of the village")
    status = main(["inspect", str(place / "tp2"), "--text", str(short), "--out", str(tmp_path), "--no-gradients"])
    report = json.loads((tmp_path / "head_diagnostics.json").read_text())
    assert status == 0 and report["tokens"] == len(hf_tokenizer()("The court of the village")["input_ids"]) - 1


REFUSED = {
    "no folder": (["nowhere"], "nowhere: no such folder"),
    "a file": (["text.txt"], "text.txt is a file: name the folder of a checkpoint"),
    "no checkpoint": (["."], "holds no checkpoint"),
    "no text": (["tp2", "--text", "gone.txt"], "--text gone.txt: cannot be read"),
    "no characters": (["tp2", "--text", "bytes"], "--text bytes: cannot be read as UTF-8"),
    "empty text": (["tp2", "--text", "empty"], "--text empty: has only 0 tokens"),
    "too many tokens": (["tp2", "--tokens", "49"], "--tokens 49: the model has 48 positions"),
    "another tokenizer": (["tp2", "--vocab-file", "larger.json"], "is outside the model's vocabulary of 300"),
    "no iteration": (["tp2", "--iteration", "7"], "iteration=7"),
    "a place that is a file": (["tp2", "--out", "text.txt"], "text.txt"),
    "weights that are not finite": (["broken", "--no-gradients"], "the loss of the text is nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_inputs_are_named(place, case, monkeypatch, capsys):
    monkeypatch.chdir(place)
    Path("bytes").write_bytes(b"\xff\xfe\xff")
    Path("empty").write_text("")
    options, message = REFUSED[case]
    if case == "another tokenizer":
        write_larger_tokenizer(Path("larger.json"))
    if case == "weights that are not finite" and not Path("broken").exists():
        write_broken(place)
    given = ["inspect", *options] + ([] if "--text" in options else ["--text", "text.txt"])
    assert main(given + ([] if "--out" in options else ["--out", "never"])) == 2
    assert message in capsys.readouterr().err
    assert case == "weights that are not finite" or not Path("never").exists()


def write_larger_tokenizer(path):
    """The tokenizer with each of its tokens moved behind the model's vocabulary."""
    contents = json.loads(TOKENIZER.read_text())
    vocabulary = contents["model"]["vocab"]
    contents["model"]["vocab"] = {token: (n + VOCAB if n > 1 else n) for token, n in vocabulary.items()}
    path.write_text(json.dumps(contents))


def write_broken(place):
    hf = hf_twin()
    with torch.no_grad():
        hf.model.layers[1].self_attn.q_proj.weight[3] = math.nan
    save_hf_twin(place / "broken", hf)
