"""tools/head_dim suggest: the arithmetic of its rules, on the published table and by hand."""

import json
import math
import re

import pytest
import torch
import yaml

from tests.helpers.configs import tiny_args
from tools.head_dim import published, rules
from tools.head_dim.__main__ import main
from tools.head_dim.rules import Question

QUESTION = Question(2560, 32, 8, 36, 4096, 1e6, 128)  # Qwen3-4B


def says(function, **changes):
    return function(Question(**{**vars(QUESTION), **changes})).says


def test_the_general_width_is_the_most_common_one():
    near = [m.head_dim for m in published.models() if m.uniform and 1280 <= m.hidden_size <= 5120]
    width, why = rules.suggested_width(2560, "general")
    assert near.count(width) == max(near.count(each) for each in near)
    assert f"{near.count(width)} of {len(near)} published models" in why


def test_tasks_go_to_the_next_published_width():
    widths = set(rules.published_widths(2560))
    general, wider, narrower = (rules.suggested_width(2560, task)[0] for task in rules.TASKS)
    assert narrower < general < wider <= 256
    assert not any(general < width < wider or narrower < width < general for width in widths)
    assert rules.suggested_width(10**6, "general")[0] == 128


def test_rank_of_the_scores():
    """A random head's scores have exactly the rank that the rule says."""
    for tokens, width in ((20, 7), (7, 20)):
        q, k = torch.randn(2, tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        rank = torch.linalg.matrix_rank(q @ k.T).item()
        assert f"rank {rank} at most" in says(rules.rank_rule, seq_length=tokens, head_dim=width)


def test_scale_makes_the_variance_one():
    q, k = torch.randn(2, 200000, 24, generator=torch.Generator().manual_seed(2))
    scale = float(says(rules.scale_rule, head_dim=24).split()[1])
    assert ((q * k).sum(-1) * scale).var().item() == pytest.approx(1, rel=0.02)


def test_cache_is_that_of_the_published_model():
    bytes_per_token = 147456  # Qwen3-4B, facts of its geometry: 2 x 36 x 8 x 128 x 2
    assert f"{bytes_per_token:,} bytes a token" in says(rules.cache_rule)


def test_the_slowest_pair_turns_once_in_its_wavelength():
    width, base = 24, 500.0
    slowest = 1 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width).max()
    assert rules.longest_wavelength(width, base) == pytest.approx(2 * math.pi / slowest.item())
    assert "fewer than the text's 99999" in says(rules.wavelength_rule, seq_length=99999, rotary_emb_base=100.0)


def test_output_init_and_learning_rate_by_the_query_width():
    weight = torch.randn(2560, 4096, generator=torch.Generator().manual_seed(3))
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(4))
    measured = (x @ weight.T).std() / (x[:, :2560] @ weight[:, :2560].T).std()
    assert f"{measured:.2f} times as large" in says(rules.output_init_rule)
    assert "0.62 times that of a square one" in says(rules.lr_rule)


def test_a_schedule_by_depth_has_the_width_in_the_middle():
    args = tiny_args(
        num_layers=37, hidden_size=64, num_attention_heads=4, head_dim=rules.progressive(QUESTION.head_dim, 37)
    )
    widths = [args.head_geometry(layer).head_dim for layer in range(37)]
    assert widths[18] == 128 and widths == sorted(widths) and widths[0] < 64 < 128 < widths[-1]
    text = says(rules.depth_rule, num_layers=37)
    assert yaml.safe_load(re.search(r"{.*?}", text)[0]) == args.head_dim
    assert f"gives {widths[0]} in the first layer and {widths[-1]} in the last" in text


@pytest.mark.parametrize("width, said", [(128, "a power of two"), (20, "padded"), (320, "no flash on CUDA")])
def test_kernels(width, said):
    assert said in says(rules.kernel_rule, head_dim=width)


def test_the_command(capsys):
    line = ["suggest", "--hidden", "2560", "--heads", "32", "--kv-heads", "8", "--layers", "36"]
    assert main([*line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["head_dim"] == 128 and "Heuristics" in report["warning"]
    assert {rule["standing"] for rule in report["rules"]} <= {"exact", "published", "measured", "claimed"}
    assert all(rule["source"] for rule in report["rules"])
    assert main([*line, "--task", "long_seq"]) == 0
    assert "Heuristics" in capsys.readouterr().out
    assert main(["suggest", "--hidden", "2560", "--heads", "32", "--kv-heads", "5"]) == 2
    assert "num_kv_heads=5" in capsys.readouterr().err
