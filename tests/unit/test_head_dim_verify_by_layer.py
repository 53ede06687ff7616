"""tools/head_dim verify of models whose layers differ, or have heads of several widths."""

import json
from pathlib import Path

import pytest

from megatron.neox_arguments import NeoXArgs
from tests.helpers.resharding import random_layers, settings_of, write_checkpoint
from tests.unit.test_head_dim_verify import hf, verify, written
from tools.head_dim import published

LOCAL_GLOBAL = [[[256] * 5 + [512], 10]]
GEMMA4_31B = dict(
    num_layers=60, hidden_size=5376, num_attention_heads=32, num_kv_heads=[[[16] * 5 + [4], 10]],
    head_dim=LOCAL_GLOBAL, ffn_hidden_size=21504, padded_vocab_size=262144, softmax_scale=1.0, norm="rmsnorm",
    rotary_emb_base=1000000, no_weight_tying=False,
)  # fmt: skip
WRONG = [256, 256, 256, 128, 256, 512, *([256] * 5 + [512]) * 9]


@pytest.mark.parametrize(
    "changes, verdict, status, said",
    [
        ({}, "this is Gemma-4-31B", 0, ""),
        (dict(head_dim=256), "head_dim=256 (layers 5, 11, 17, 23, 29, 35, 41, 47, 53, 59): published 512", 1, ""),
        (dict(head_dim=WRONG), "Gemma-4-31B, but head_dim=128 (layer 3): published 256", 1, ""),
        (dict(head_dim=[[[512] + [256] * 5, 10]]), "head_dim=512 (layers 0, 6, 12, 18", 1, ""),
        (dict(softmax_scale=None), "this is Gemma-4-31B", 1, "the softmax scale is 0.0625 (layers 0-4, 6-10"),
        (
            dict(num_layers=54, head_dim=[[[256] * 5 + [512], 9]], num_kv_heads=[[[16] * 5 + [4], 9]]),
            "Gemma-4-31B, but num_layers=54: published 60",
            1,
            "",
        ),
    ],
)
def test_widths_by_layer(tmp_path, capsys, changes, verdict, status, said):
    """Each layer is compared with its own published widths."""
    found, report = verify(capsys, written(tmp_path, **{**GEMMA4_31B, **changes}))
    assert verdict in report["verdict"]
    assert said in "".join(report["problems"]) and bool(report["problems"]) == bool(said)
    assert found == status
    if not changes:
        assert report["tensor_parallel"]["8"] == (
            "layers 0-4, 6-10, 12-16, 18-22, 24-28, 30-34, 36-40, 42-46, 48-52, 54-58: 4 heads and 2 kv heads a rank; "
            "layers 5, 11, 17, 23, 29, 35, 41, 47, 53, 59: 4 heads and 1 kv heads a rank, each on 2 ranks"
        )


def test_groups_of_heads_in_a_layer(tmp_path, capsys):
    """Named as other layers that differ; each group is split by itself."""
    widths = [[128, 64], dict(layer=[3, 63], groups=[[64, 32, 4], [192, 32, 4]])]
    status, report = verify(capsys, written(tmp_path, head_dim=widths))
    assert status == 1
    assert report["verdict"] == "Qwen3-32B, but head_dim=64 + 192 (layers 3, 63): published 128"
    assert report["tensor_parallel"]["8"].endswith(
        "layers 3, 63: 4 heads and 1 kv heads of 64 a rank, each on 2 ranks + "
        "4 heads and 1 kv heads of 192 a rank, each on 2 ranks"
    )
    assert "0.125 + 0.0721688 (layers 3, 63), the default" in "".join(report["notes"])


def test_a_hugging_face_model_of_several_widths_is_recognised(tmp_path, capsys):
    """One that cannot be held for other reasons: its numbers are those of the file."""
    config = dict(
        model_type="gemma4_text", hidden_size=2816, num_hidden_layers=30, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, global_head_dim=512, num_global_key_value_heads=2,
        intermediate_size=2112, vocab_size=262144, num_experts=128, enable_moe_block=True,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5,
    )  # fmt: skip
    status, report = verify(capsys, hf(tmp_path, **config))
    assert status == 1 and report["problems"]
    assert "Gemma-4-26B-A4B" in report["verdict"] and report["differences"] == []
    assert report["numbers"]["num_kv_heads"][4:7] == [8, 2, 8]


def test_shares_of_rotation_by_layer():
    """Gemma 4 turns whole heads of the local layers, a quarter of those of the global ones."""
    model = published.named("Gemma-4-E2B")
    numbers = {"partial_rotary": ([1.0] * 4 + [0.25]) * 7}
    assert published.differences(numbers, model, published.OTHERS) == []
    assert published.differences({"partial_rotary": 1.0}, model, published.OTHERS) == [
        "partial_rotary=1.0 (layers 4, 9, 14, 19, 24, 29, 34): published 0.25"
    ]


@pytest.mark.parametrize(
    "variant, other, said",
    [
        # The first layer is as wide as before: what is compared is a layer of each width.
        (
            "kv heads by layer, full_width",
            dict(head_dim=[14, 6, 10]),
            "layer 1: attention.query_key_value.weight is (160, 88) on each rank; its settings make it (96, 88)",
        ),
        (
            "gqa groups, full_width",
            dict(head_dim=[[10, 3], dict(layer=1, groups=[[6, 8, 4], [24, 4, 2]])]),
            "layer 1: attention.dense.weight is (88, 136) on each rank; its settings make it (88, 144)",
        ),
    ],
)
def test_checkpoints_of_several_widths(variant, other, said, tmp_path, capsys):
    settings = settings_of(variant)
    folder = write_checkpoint(tmp_path, random_layers(NeoXArgs.from_dict(settings)), settings)
    capsys.readouterr()
    _, report = verify(capsys, tmp_path)
    assert report["problems"] == [] and report["kind"] == "checkpoint"
    (config,) = Path(folder, "configs").iterdir()
    config.write_text(json.dumps({**json.loads(config.read_text()), **other}))
    status, report = verify(capsys, tmp_path)
    assert status == 1 and said in report["problems"]
