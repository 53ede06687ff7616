"""tools/head_dim verify and from-hf: what is recognised, what is reported, and the exit status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.geometry import HeadGeometry
from megatron.neox_arguments import NeoXArgs
from tests.helpers.convert_folders import run_import, saved
from tools.head_dim import published
from tools.head_dim.__main__ import main

ROOT = Path(__file__).parents[2]
QWEN3_32B = dict(
    num_layers=64, hidden_size=5120, num_attention_heads=64, num_kv_heads=8, head_dim=128, ffn_hidden_size=25600,
    qk_norm_type="per_head", norm="rmsnorm", activation="swiglu", pos_emb="rotary", rotary_emb_base=1000000,
    no_weight_tying=True, seq_length=4096, max_position_embeddings=4096, train_micro_batch_size_per_gpu=1,
    padded_vocab_size=151936,
)  # fmt: skip
HF_QWEN3_4B = dict(
    model_type="qwen3", hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, intermediate_size=9728, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=40960,
    rope_theta=1000000.0,
)  # fmt: skip


def verify(capsys, *paths):
    """Exit status and the report, or what was said on stderr."""
    status = main(["verify", *map(str, paths), "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else err


def written(folder, **changes):
    """A YAML file of Qwen3-32B with changes; None takes a setting away."""
    settings = {key: value for key, value in {**QWEN3_32B, **changes}.items() if value is not None}
    path = folder / "model.yml"
    path.write_text(yaml.safe_dump(settings))
    return path


def hf(folder, **changes):
    """A folder with a config.json of Qwen3-4B with changes."""
    config = {key: value for key, value in {**HF_QWEN3_4B, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_published_model_is_its_own_nearest():
    for model in published.models():
        numbers = {key: model.number(key) for key in (*published.GEOMETRY, *published.OTHERS)}
        nearest = published.closest(numbers)
        assert published.differences(numbers, nearest) == []
        assert nearest == model or nearest.name.replace("-2-", "-3-") == model.name  # OLMo 3 has OLMo 2's numbers


def test_the_published_rows_are_whole_and_have_sources():
    assert len(published.models()) == 99
    assert all(model.source for model in published.models())
    uniform = [model for model in published.models() if model.uniform]
    assert len(uniform) == 88
    for model in uniform:
        HeadGeometry.from_config(
            model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.head_dim
        )  # raises if heads do not divide
    by_layer = [model for model in published.models() if model.can_be_held and not model.uniform]
    assert [model.name for model in by_layer] == [f"Gemma-4-{size}" for size in ("E2B", "E4B", "26B-A4B", "31B")]
    wider = [model for model in uniform if model.num_attention_heads * model.head_dim != model.hidden_size]
    assert len(wider) > 30


@pytest.mark.parametrize(
    "changes, verdict, status, said",
    [
        ({}, "this is Qwen3-32B", 0, ""),
        (dict(padded_vocab_size=152064), "this is Qwen3-32B", 0, ""),
        (dict(num_attention_heads=40), "Qwen3-32B, but num_attention_heads=40: published 64", 1, ""),
        (dict(head_dim=None), "Qwen3-32B, but head_dim=80: published 128", 1, "Qwen3-32B has 128: set it"),
        (dict(num_kv_heads=4, num_layers=60), "num_layers=60: published 64; num_kv_heads=4: published 8", 1, ""),
        (dict(qk_norm_type=None), "this is Qwen3-32B", 1, "qk_norm_type is None: Qwen3-32B has per_head"),
        (dict(softmax_scale=0.1), "this is Qwen3-32B", 1, "the softmax scale is 0.1: Qwen3-32B has 0.0883883"),
        (dict(hidden_size=96, num_layers=2, ffn_hidden_size=52), "no published model is near", 0, ""),
    ],
)
def test_configs(tmp_path, capsys, changes, verdict, status, said):
    found, report = verify(capsys, written(tmp_path, **changes))
    assert verdict in report["verdict"]
    assert found == status
    assert said in "".join(report["problems"])
    assert bool(report["problems"]) == bool(said)


def test_an_expected_model(tmp_path, capsys):
    path = str(written(tmp_path))
    assert main(["verify", path, "--expect", "qwen3-32b"]) == 0
    assert main(["verify", path, "--expect", "Qwen3-4B"]) == 1
    assert "Qwen3-4B, but hidden_size=5120: published 2560" in capsys.readouterr().out
    assert main(["verify", path, "--expect", "Qwen9"]) == 2
    assert "no published model of that name" in capsys.readouterr().err


def test_tensor_parallel_sizes(tmp_path, capsys):
    _, report = verify(capsys, written(tmp_path, num_attention_heads=12, num_kv_heads=2))
    splits = report["tensor_parallel"]
    assert splits["2"] == "6 heads and 1 kv heads a rank"
    assert splits["4"] == "3 heads and 1 kv heads a rank, each on 2 ranks"
    assert "num_attention_heads=12 does not divide by model_parallel_size=8" in splits["8"]


def test_a_backend_that_runs_nowhere(tmp_path, capsys, monkeypatch):
    path = written(tmp_path, attention_config=[[["chunked"], 64]], precision="bfloat16")
    assert verify(capsys, path)[1]["problems"] == []
    from megatron.model.attention.core import chunked

    monkeypatch.setattr(chunked, "refusal", lambda request: f"head_dim={request.geometry.head_dim} is too wide")
    status, report = verify(capsys, path)
    assert status == 1
    assert report["problems"] == ["attention_config=chunked on cuda: head_dim=128 is too wide"]


@pytest.mark.parametrize(
    "changes, verdict, status",
    [
        ({}, "this is Qwen3-4B", 0),
        (dict(head_dim=None), "this is Qwen3-4B", 0),  # null means the class's, which is 128
        (dict(head_dim="absent"), "this is Qwen3-4B", 0),
        (dict(head_dim=80), "Qwen3-4B, but head_dim=80: published 128", 1),
        (dict(num_attention_heads=24, head_dim=256), "num_attention_heads=24", 1),  # not "repaired"
        (dict(model_type="llama", rope_theta=1000000.0), "this is Qwen3-4B", 1),  # without the norms
    ],
)
def test_hugging_face_configs(tmp_path, capsys, changes, verdict, status):
    found, report = verify(capsys, hf(tmp_path, **changes))
    assert verdict in report["verdict"]
    assert found == status


def test_a_model_that_cannot_be_held_is_still_recognised(tmp_path, capsys):
    deepseek = dict(
        model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, intermediate_size=18432,
        vocab_size=129280,
    )  # fmt: skip
    status, report = verify(capsys, hf(tmp_path, **deepseek, head_dim="absent"))
    assert status == 1
    assert "DeepSeek-V3" in report["verdict"]
    assert "kv_lora_rank=512: multi-head latent attention is not built" in report["problems"]  # one a line
    assert report["numbers"]["head_dim"] == 192 and report["differences"] == []


def test_checkpoints(tmp_path, capsys):
    source, out = str(tmp_path / "hf"), tmp_path / "neox"
    saved(source, "qwen3")
    checkpoint = run_import(source, str(out))
    status, report = verify(capsys, out)
    assert (status, report["kind"], report["problems"]) == (0, "checkpoint", [])
    config = yaml.safe_load((out / "model.yml").read_text())
    assert {report["numbers"][key] == config[key] for key in ("hidden_size", "head_dim", "num_layers")} == {True}
    kept = next((tmp_path / "neox").glob("global_step*/configs/*.yml"))
    halved = {key: config[key] // 2 for key in ("num_attention_heads", "num_kv_heads")}
    swapped = {**config, **halved, "head_dim": 2 * config["head_dim"]}  # the same shapes
    kept.write_text(yaml.safe_dump(swapped))
    status, report = verify(capsys, checkpoint)
    assert status == 1 and "head_dim" in "".join(report["problems"])
    layer = next((tmp_path / "neox").glob("global_step*/mp_rank_00*"))
    layer.unlink()
    assert verify(capsys, checkpoint)[0] == 2


@pytest.mark.parametrize(
    "text, said",
    [("{", "is not JSON"), ("[1]", "holds no mapping"), ('{"model_type": "t5x"}', "t5x")],
)
def test_unreadable(tmp_path, capsys, text, said):
    (tmp_path / "config.json").write_text(text)
    status = main(["verify", str(tmp_path)])
    out, err = capsys.readouterr()
    assert status in (1, 2) and said in out + err
    assert main(["verify", str(tmp_path / "absent.yml")]) == 2


def test_from_hf_gives_the_model(tmp_path, capsys):
    out = tmp_path / "model.yml"
    assert main(["from-hf", str(hf(tmp_path)), "-o", str(out)]) == 0
    assert "The geometry is that of Qwen3-4B" in out.read_text()
    args = NeoXArgs.from_dict({**yaml.safe_load(out.read_text()), "train_micro_batch_size_per_gpu": 1})
    assert args.head_geometry() == HeadGeometry(2560, 32, 8, 128, 128)
    assert (args.qk_norm_type, args.rotary_emb_base, args.no_weight_tying) == ("per_head", 1e6, False)
    assert main(["verify", str(out), "--expect", "Qwen3-4B"]) == 0
    assert main(["from-hf", str(tmp_path), "-o", str(out)]) == 2
    assert "there is such a file" in capsys.readouterr().err


def test_from_hf_of_what_cannot_be_held(tmp_path, capsys):
    hf(tmp_path, model_type="mixtral", num_local_experts=8)
    assert main(["from-hf", str(tmp_path), "-o", str(tmp_path / "out.yml")]) == 2
    assert "mixture of experts is not built" in capsys.readouterr().err
    assert not (tmp_path / "out.yml").exists()


def test_wrong_places_say_what_to_name(tmp_path, capsys):
    """And none is looked at with torch or transformers first."""
    empty = tmp_path / "empty"
    empty.mkdir()
    folder = str(hf(tmp_path))
    for command, path, said in (
        ("plan", folder, f"is a folder, name YAML files; `python -m tools.head_dim from-hf {folder}` writes one"),
        ("plan", f"{folder}/config.json", "this is a Hugging Face config, not a YAML file"),
        ("plan", str(empty), "is a folder, name YAML files\n"),
        ("verify", str(empty), "neither a config.json nor a checkpoint"),
        ("from-hf", str(empty), "config.json cannot be read: No such file or directory"),
    ):
        assert main([command, path]) == 2
        assert said in capsys.readouterr().err


def test_commands_that_need_no_tensors_import_none():
    """torch alone takes longer than these commands do."""
    code = """
import sys
from tools.head_dim.__main__ import main
for command in (["verify", "configs/qwen3/qwen3-4B.yml"], ["suggest", "--hidden", "2560", "--heads", "32"]):
    assert main(command) == 0
assert main(["from-hf", "nowhere"]) == 2
print(sorted({"torch", "transformers", "deepspeed", "matplotlib"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "[]", run.stdout + run.stderr
