"""verify_conversion.py says that two models are one, where they part if they are not, and what cannot be compared."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron.convert.exporting import export_hf
from megatron.convert.families import FAMILIES
from megatron.convert.importing import import_hf
from megatron.convert.transformers_run import load_hf, run_hf
from megatron.convert.verify import TOLERANCE, Run, compared, verify
from megatron.errors import ConversionError
from tests.helpers import conversion_grid as grid
from tests.helpers.convert_models import VOCAB, hf_config, hf_model, text
from tests.helpers.evaluation import EOD, hf_tokenizer
from tests.helpers.tolerances import FORWARD, assert_close
from tools.ckpts import verify_conversion

CONVERTIBLE = [name for name in FAMILIES if name != "mixtral"]
LAYERS, CONTEXT = 3, 40
WORDS = "The court of the village met on the first day of March. Nobody knew why the north wall had been whitened.\n"


@pytest.fixture(scope="module", autouse=True)
def quiet():
    grid.quiet()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Qwen3 with a tokenizer whose end token must not end what is compared; imported at 2 ranks."""
    folder = tmp_path_factory.mktemp("verify")
    widths = dict(hidden_size=80, num_attention_heads=6, head_dim=24, num_hidden_layers=LAYERS, vocab_size=300)
    config = hf_config("qwen3", **widths, max_position_embeddings=CONTEXT, eos_token_id=EOD)
    hf_model(config).save_pretrained(folder / "hf")
    hf_tokenizer().save_pretrained(folder / "hf")
    import_hf(str(folder / "hf"), str(folder / "neox"), model_parallel_size=2, progress=False)
    (folder / "text").write_text(WORDS)
    return folder


def _main(folders, *options, hf=None, neox=None):
    return verify_conversion.main(
        ["--hf", str(hf or folders / "hf"), "--neox", str(neox or folders / "neox"), *options]
    )


def test_an_import_is_the_same_model(folders, capsys):
    assert _main(folders, "--text", str(folders / "text"), "--tokens", "30", "--generate", "8") == 0
    shown = capsys.readouterr().out
    assert "the same model" in shown and "NOT" not in shown and "they first differ" not in shown
    for place in ("embedding", *(f"layer {number}" for number in range(LAYERS)), "final norm", "logits", "generation"):
        assert f" {place} " in shown
    (loss,) = (line for line in shown.splitlines() if "loss of the text" in line)
    ids = hf_tokenizer()(WORDS, return_tensors="pt")["input_ids"][:, :30]
    with torch.no_grad():
        expected = load_hf(str(folders / "hf"))(input_ids=ids, labels=ids).loss.item()
    assert f"{expected:.6f}" in loss and loss.count(f"{expected:.5f}") == 2
    assert _main(folders, "--random", "--tokens", str(CONTEXT)) == 0, "the prompt is cut so that tokens can follow"


CHANGED = {
    "embedding": ("model.embed_tokens.weight", "embedding"),
    "attention": ("model.layers.1.self_attn.v_proj.weight", "layer 1 attention"),
    "mlp": ("model.layers.1.mlp.up_proj.weight", "layer 1"),
    "final norm": ("model.norm.weight", "final norm"),
    "head": ("lm_head.weight", "logits"),
}


@pytest.mark.parametrize("tensor, place", CHANGED.values(), ids=CHANGED)
def test_the_first_difference_is_found(folders, tmp_path, capsys, tensor, place):
    hf = _copy(folders, tmp_path)
    tensors = load_file(hf / "model.safetensors")
    tensors[tensor] = tensors[tensor] * 1.003
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    assert _main(folders, hf=hf) == 1
    shown = capsys.readouterr().out
    assert f"they first differ at: {place} (" in shown and "NOT the same model" in shown


def test_another_number_in_the_config_is_found(folders, tmp_path, capsys):
    """Theirs rotates by another base, which no weight shows: the first attention differs, what enters it does not."""
    hf = _copy(folders, tmp_path)
    config = json.loads((hf / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (hf / "config.json").write_text(json.dumps(config))
    assert _main(folders, "--generate", "0", hf=hf) == 1
    assert "they first differ at: layer 0 attention (" in capsys.readouterr().out


def _copy(folders, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in (folders / "hf").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_what_cannot_be_compared_is_an_error(folders, tmp_path, capsys):
    hf = _copy(folders, tmp_path)
    (tmp_path / "short").write_text("Hello")
    (tmp_path / "latin").write_bytes("für".encode("latin-1"))
    wide = tmp_path / "wide"
    hf_model(hf_config("qwen3", hidden_size=72, head_dim=24, num_hidden_layers=2, vocab_size=600)).save_pretrained(wide)
    tensors = load_file(hf / "model.safetensors")
    renamed = {name.replace("layers.2.mlp", "layers.2.ffn"): tensor for name, tensor in tensors.items()}
    save_file(renamed, hf / "model.safetensors", metadata={"format": "pt"})
    cases = {
        ("--generate", str(CONTEXT)): f"the model has {CONTEXT} positions",
        ("--tokens", str(CONTEXT + 1)): f"tokens={CONTEXT + 1}",
        ("--text", str(tmp_path / "short"), "--tokens", "20"): "has only",
        ("--text", str(tmp_path / "latin")): "UTF-8",
        ("--text", str(tmp_path / "none")): "none",
        ("--hf", str(hf)): "layers.2.mlp",
        ("--hf", str(wide)): "num_layers=3: the Hugging Face model has 2",
        ("--hf", str(tmp_path)): "transformers cannot load it",
        ("--neox", str(tmp_path)): "holds no checkpoint",
        ("--hf", str(wide), "--text", str(folders / "text")): "--random",
    }
    for options, message in cases.items():
        assert _main(folders, *options) == 1, options
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, (options, error)
    assert _main(folders, "--hf", str(wide)) == 1
    error = capsys.readouterr().err
    assert "hidden_size=80: the Hugging Face model has 72" in error and "vocab_size=600" in error, "all at once"


def test_their_generation_is_greedy_and_does_not_stop(folders):
    """Each token by a forward pass over all tokens before it; the end token is among them."""
    model, prompt = (
        load_hf(str(folders / "hf")),
        torch.randint(0, 300, (2, 7), generator=torch.Generator().manual_seed(3)),
    )
    model.lm_head.weight.data[EOD] *= 3  # it wins often
    expected = prompt
    with torch.no_grad():
        for _ in range(9):
            expected = torch.cat([expected, model(input_ids=expected).logits[:, -1:].argmax(-1)], dim=1)
    fed = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    _, tokens, logits = run_hf(model, prompt, prompt, 9)
    assert fed == [7, 7, *[1] * 8], "once for the hidden states, then by the cache"
    assert torch.equal(tokens, expected[:, 7:]) and logits.shape == (9, 2, 300)
    assert (tokens[:, :-1] == EOD).any(), "the test would see nothing"


def _run(logits, tokens, steps):
    return Run({"logits": torch.tensor(logits)[None]}, torch.tensor([tokens]), torch.tensor(steps)[:, None])


IDS = torch.tensor([[0, 1]])
LOGITS = [[1.0, 2.0], [3.0, 4.0]]


def test_a_tie_is_no_difference_and_all_else_is():
    same = _run(LOGITS, [1, 0], [[0.0, 1.0], [5.0, 5.0]])
    tie = _run(LOGITS, [1, 1], [[0.0, 1.0], [5.0, 5.00001]])
    assert compared(same, same, IDS, TOLERANCE).agrees
    report = compared(same, tie, IDS, TOLERANCE)
    assert report.agrees and report.rows[0].step == 1 and report.rows[0].agrees
    after_it = _run(LOGITS, [1, 1, 0], [[0.0, 1.0], [5.0, 5.00001], [9.0, 0.0]])
    assert compared(_run(LOGITS, [1, 0, 1], [[0.0, 1.0], [5.0, 5.0], [0.0, 7.0]]), after_it, IDS, TOLERANCE).agrees
    apart = _run(LOGITS, [1, 1], [[0.0, 1.0], [5.0, 5.1]])
    assert not compared(same, apart, IDS, TOLERANCE).agrees
    chosen_wrongly = _run(LOGITS, [0, 0], [[0.0, 1.0], [5.0, 5.0]])
    report = compared(same, chosen_wrongly, IDS, TOLERANCE)
    assert not report.agrees and report.rows[0].margin == 1.0
    nan = _run([[1.0, float("nan")], [3.0, 4.0]], [1, 0], [[0.0, 1.0], [5.0, 5.0]])
    assert not compared(same, nan, IDS, TOLERANCE).agrees and not compared(nan, nan, IDS, TOLERANCE).agrees
    assert "a difference at generated token 0" in verify_conversion.generated_lines(0, report.rows[0], None)[0]


def test_what_is_allowed_grows_with_the_values():
    for size, difference, agrees in ((100.0, 1e-3, True), (100.0, 3e-3, False), (0.5, 1e-5, True), (0.5, 3e-5, False)):
        theirs, ours = (
            SimpleNamespace(states={"x": torch.tensor([[[size + d]]], dtype=torch.float64)}) for d in (0.0, difference)
        )
        (place,) = compared(_with(theirs), _with(ours), torch.tensor([[0]]), TOLERANCE).places[:1]
        assert place.agrees == agrees and place.largest == pytest.approx(difference)


def _with(run):
    return Run({**run.states, "logits": torch.zeros(1, 1, 2)}, torch.empty(1, 0), torch.empty(0, 1, 2))


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """{family: (our checkpoint, its export)}, of random weights, in the geometry that each can hold."""
    place, made = tmp_path_factory.mktemp("exports"), {}
    for family in CONVERTIBLE:
        geometry = "quotient" if family == "gpt_neox" else "mqa"
        checkpoint = grid.save_ours(grid.our_args(family, geometry), place / family / "neox")
        out = str(place / family / "hf")
        made[family] = (
            checkpoint,
            export_hf(str(checkpoint), out, architecture=family, vocab_size=VOCAB, progress=False),
        )
    return made


@pytest.mark.parametrize("family", CONVERTIBLE)
def test_each_family_is_compared_at_every_place(exports, family):
    """Hidden states are where they should be in each class: equal, and as many as there are."""
    checkpoint, exported = exports[family]
    report = verify(exported, str(checkpoint), lambda config: text(), generate=4)
    assert report.agrees, report.first_difference
    layers = [name for number in range(2) for name in (f"layer {number} attention", f"layer {number}")]
    assert [place.name for place in report.places] == ["embedding", *layers, "final norm", "logits"]
    assert all(place.magnitude > 0.01 for place in report.places)
    assert [row.ours for row in report.rows] == [row.theirs for row in report.rows] and len(report.rows[0].ours) == 4


LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
tokens, folders = torch.load(sys.argv[1]), json.loads(sys.argv[2])
with torch.no_grad():
    logits = {name: AutoModelForCausalLM.from_pretrained(path)(tokens).logits for name, path in folders.items()}
torch.save(logits, sys.argv[3])
print("megatron" in sys.modules)
"""


def test_a_fresh_process_loads_the_exports(exports, tmp_path):
    """Nothing of this project is needed for it."""
    torch.save(text(), tmp_path / "tokens")
    paths = json.dumps({family: exported for family, (_, exported) in exports.items()})
    command = [sys.executable, "-c", LOAD, tmp_path / "tokens", paths, tmp_path / "logits"]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False" and "newly initialized" not in done.stderr
    for family, logits in torch.load(tmp_path / "logits").items():
        ours = grid.our_logits(str(exports[family][0] / "global_step0"))
        assert ours.abs().max() > 1
        assert_close(logits.float(), ours, FORWARD, family)


def test_the_folder_says_its_precision_and_tokens(exports):
    """What from_pretrained goes by, besides the geometry: written out, never left to a class's default."""
    for family, (checkpoint, exported) in exports.items():
        keys = json.loads((Path(exported) / "config.json").read_text())
        assert keys["dtype"] == "float32" and type(keys["head_dim"]) is int and keys["vocab_size"] == VOCAB
        given = yaml.safe_load((checkpoint / "global_step0" / "configs" / "model.yml").read_text())
        assert keys["head_dim"] == (given["head_dim"] or 16), family
        with pytest.raises(ConversionError, match="there already"):
            export_hf(str(checkpoint), exported, progress=False)
