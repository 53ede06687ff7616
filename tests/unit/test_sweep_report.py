"""tools/head_dim sweep: intervals, ranking, summary, pictures, the page in its two forms, and the docs made of it."""

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from tools.head_dim.sweep import page, pictures, report, tables
from tools.head_dim.sweep.results import ranking
from tools.head_dim.sweep.statistics import estimate, paired, t_probability, t_quantile
from tools.head_dim.sweep.study import load_study, study_of
from tools.head_dim.sweep.summary import summarise

ROOT = Path(__file__).resolve().parents[2]
TABLE = {1: (6.3138, 12.7062), 2: (2.9200, 4.3027), 3: (2.3534, 3.1824), 4: (2.1318, 2.7764), 9: (1.8331, 2.2622),
         30: (1.6973, 2.0423), 120: (1.6577, 1.9799)}  # fmt: skip
"""Printed tables of Student's t: degrees of freedom -> values at 0.95 and 0.975."""


@pytest.mark.parametrize("degrees", TABLE)
def test_t_values_are_those_of_printed_tables(degrees):
    assert t_quantile(0.95, degrees) == pytest.approx(TABLE[degrees][0], abs=6e-5)
    assert t_quantile(0.975, degrees) == pytest.approx(TABLE[degrees][1], abs=6e-5)
    assert t_probability(0.0, degrees) == 0.5
    assert t_probability(-1.3, degrees) == pytest.approx(1 - t_probability(1.3, degrees), abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_intervals_hold_the_true_mean_as_often_as_they_say(count):
    draws = np.random.default_rng(count).normal(3.0, 2.0, size=(2000, count))
    held = [low <= 3.0 <= high for low, high in (estimate(list(each)).interval for each in draws)]
    assert np.mean(held) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 2000))


def test_an_interval_by_hand():
    found = estimate([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)
    assert found.mean == 2.0 and found.interval == pytest.approx((2 - half, 2 + half), abs=1e-9)
    assert estimate([1.5]) == (1.5, None)


def test_differences_are_taken_seed_by_seed():
    """Seeds differ by 1, variants by 0.1: unpaired, the difference would drown."""
    found = paired({1: 1.1, 2: 2.1, 3: 3.1, 9: 50.0}, {3: 3.0, 2: 2.0, 1: 1.0, 8: -50.0})
    assert found.mean == pytest.approx(0.1) and found.interval == pytest.approx((0.1, 0.1), abs=1e-9)
    assert paired({1: 1.0}, {2: 1.0}) is None


LOSSES = {"wide <x>": [2.9, 3.1, 3.0], "narrow": [3.0, 3.2, 3.1], "odd": [2.0, 4.5, 3.2], "worse": [3.5, 3.71, 3.6]}
STEPS = [10, 20]


def made_run(name, seed, loss, status="finished"):
    figures = {
        "gradient_norm": [1.0, 4.0],
        "entropy_share": [0.5, 0.5],
        "qk_rank": [2.0, 6.0],
        "score_max": [9.0, None],
    }
    looks = [{"iteration": 20, "tokens": 8, "layers": [{"layer": 0, "head_dim": 8, "figures": figures}],
              "findings": [{"rule": "a rule"}]}] if seed < 3 else []  # fmt: skip
    return {
        "variant": name, "seed": seed, "status": status, "error": None if status == "finished" else "it | broke",
        "train": {"step": STEPS, "loss": [4.0 + seed, loss - 0.1], "grad_norm": [1.0, 1.0], "lr": [0.1, 0.1]},
        "validation": {"step": [20], "loss": [loss]},
        "tokens_per_second": 1000.0 * seed, "peak_rss_bytes": 400 * 2**20, "seconds": 60.0, "threads": 1,
        "heads": looks,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results():
    runs = [made_run(name, seed, loss) for name, losses in LOSSES.items() for seed, loss in enumerate(losses, 1)]
    runs.append(made_run("worse", 4, 9.9, status="failed"))
    variant = dict(changes={}, widths={"head_dim": 8, "ffn_hidden_size": [16, [24, 32]]}, flops_per_token=600.0,
                   memory_estimate_bytes=5 * 2**20)  # fmt: skip
    return {
        "study": {"name": "a <b> study", "about": "What is it for?", "baseline": "narrow", "seeds": [1, 2, 3],
                  "at_equal": "params", "adjust": "ffn_hidden_size", "settings": {"num_layers": 2}},
        "machine": {"processor": "a processor", "cores": 2, "torch": "2"},
        "variants": [{"name": name, "parameters": 1000 + 5 * number, **variant} for number, name in enumerate(LOSSES)],
        "runs": runs,
        "ranking": ranking("narrow", list(LOSSES), runs),
    }  # fmt: skip


def test_the_ranking_and_its_verdicts(results):
    rows = {row["variant"]: row for row in results["ranking"]}
    assert [row["variant"] for row in results["ranking"]] == ["wide <x>", "narrow", "odd", "worse"]
    assert [rows[name]["verdict"] for name in LOSSES] == ["lower", None, "not decided", "higher"]
    assert rows["wide <x>"]["difference"] == pytest.approx(-0.1) and rows["narrow"]["difference"] is None
    assert rows["worse"]["mean"] == pytest.approx(np.mean(LOSSES["worse"])), "a failed run was counted"
    half = TABLE[2][1] * np.std(LOSSES["odd"], ddof=1) / math.sqrt(3)
    assert rows["odd"]["interval"] == pytest.approx(
        (np.mean(LOSSES["odd"]) - half, np.mean(LOSSES["odd"]) + half), abs=1e-3
    )


def test_one_seed_decides_nothing():
    rows = ranking("a", ["a", "b"], [made_run("a", 1, 3.0), made_run("b", 1, 1.0)])
    assert rows[0]["verdict"] == "not decided" and rows[0]["difference"] == -2.0
    assert rows[0]["interval"] is None and rows[0]["difference_interval"] is None


def test_the_summary_keeps_means_and_extremes(results):
    summary = summarise(results)
    wide, worse = summary["variants"][0], summary["variants"][3]
    assert wide["train"] == {"step": STEPS, "mean": [6.0, 2.9], "low": [5.0, 2.8], "high": [7.0, 3.0]}
    assert wide["validation"] == {"step": [20], "mean": [3.0], "low": [2.9], "high": [3.1]}
    assert wide["tokens_per_second"] == [1000.0, 2000.0, 3000.0] and len(worse["tokens_per_second"]) == 3
    heads = wide["heads"]
    assert heads["runs"] == 2 and heads["findings"] == {"a rule": 2}
    assert heads["figures"]["qk_rank"] == [4.0, 4.0] and heads["figures"]["qk_rank_share"] == [0.5, 0.5]
    runs = [made_run("odd", 1, 3.0)]
    runs[0]["heads"][0]["layers"][0]["head_dim"] = [8, 16]  # of groups of heads, one for each head
    grouped = summarise({**results, "runs": runs})["variants"][2]["heads"]
    assert grouped["figures"]["qk_rank_share"] == [(2 / 8 + 6 / 16) / 2]
    assert heads["figures"]["gradient_ratio"] == [4.0, 4.0] and heads["figures"]["score_max"] == [9.0, 9.0]
    assert summary["runs"] == {"finished": 12, "failed": 1}
    assert summary["not_finished"] == [{"variant": "worse", "seed": 4, "status": "failed", "error": "it | broke"}]
    assert len(json.dumps(summary)) < 6000


def test_curves_end_where_a_loss_is_no_number():
    results = [made_run("a", 1, 3.0), made_run("a", 2, 3.0)]
    results[1]["train"]["loss"][1] = None
    given = {"study": {}, "machine": {}, "variants": [{key: None for key in (
        "changes", "widths", "parameters", "flops_per_token", "memory_estimate_bytes")} | {"name": "a"}],
        "runs": results, "ranking": []}  # fmt: skip
    assert summarise(given)["variants"][0]["train"]["step"] == [10]


def test_the_page_and_its_pictures(results, tmp_path):
    files = report.write(results, str(tmp_path))
    assert [Path(path).name for path in files] == [
        "summary.json", "report.html", "curves.png", "ranking.png", "costs.png", "heads.png",
    ]  # fmt: skip
    html = (tmp_path / "report.html").read_text()
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    drawn = {(tmp_path / Path(path).name).read_bytes() for path in files[2:]}
    assert {base64.b64decode(image) for image in images} == drawn and len(drawn) == 4
    assert not re.search(r'(src|href)="(?!data:)', html), "the page needs another file"
    assert "<h1>a &lt;b&gt; study</h1>" in html and "wide &lt;x&gt;" in html and "<x>" not in html
    for text in (
        "What is it for?",
        "3.0000",
        "-0.1000",
        "not decided",
        "num_layers: 2",
        "1,005",
        "16 to 32",
        "it | broke",
    ):
        assert text in html, text
    assert "12 finished, 1 failed" in html and "equal to narrow in params by ffn_hidden_size" in html


def test_the_same_in_markdown(results):
    summary = summarise(results)
    text = report.as_markdown(report.parts(summary, {"ranking": "studies/a_ranking.png"}))
    assert "### Ranking" in text and "](studies/a_ranking.png)" in text and "### Heads" not in text
    assert "lower than narrow's: wide <x>; higher than narrow's: worse; not told apart from narrow's: odd." in text
    rows = [line for line in text.splitlines() if line.startswith("| 1 | wide <x> | 3.0000 |")]
    assert len(rows) == 1 and rows[0].endswith("| -0.1000 | -0.1000 to -0.1000 | lower |")
    assert "it / broke" in text, "a bar in a cell would begin another"


def test_what_the_pictures_show(results):
    summary = summarise(results)
    training, validation = pictures.curves(summary).axes
    lines = {line.get_label(): line for line in training.get_lines()}
    assert list(lines) == list(LOSSES)
    assert list(lines["odd"].get_xdata()) == STEPS and lines["odd"].get_ydata()[1] == pytest.approx(
        np.mean(LOSSES["odd"]) - 0.1, abs=1e-4
    )
    assert len(validation.get_lines()) == 4
    losses, differences = pictures.ranking(summary).axes
    assert [label.get_text() for label in losses.get_yticklabels()] == ["wide <x>", "narrow", "odd", "worse"]
    assert losses.get_ylim()[0] > losses.get_ylim()[1], "the best is above"
    titles = [axis.get_title() for axis in pictures.heads(summary).axes if axis.get_visible()]
    assert titles == [
        tables.FIGURES[name] for name in tables.FIGURES if name in summary["variants"][0]["heads"]["figures"]
    ]
    assert pictures.drawn({**summary, "ranking": []}) == ["curves", "costs", "heads"]


def test_nothing_has_run_yet(results, tmp_path):
    runs = [{**made_run(name, 1, 3.0, "not started"), "train": {"step": [], "loss": []}, "heads": [],
             "validation": {"step": [], "loss": []}, "threads": None} for name in LOSSES]  # fmt: skip
    files = report.write({**results, "runs": runs, "ranking": []}, str(tmp_path))
    assert len(files) == 2 and "not started" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("name", page.published() or [None])
def test_the_reports_in_the_docs_are_of_their_summaries(name):
    if name is not None:
        assert page.section(name).written() == page.body(name)
        for picture in re.findall(r"\]\((studies/[^)]+)\)", page.body(name)):
            assert (page.PAGE.parent / picture).stat().st_size > 10_000


def test_a_report_is_put_into_its_place(results, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PAGE", tmp_path / "sweeps.md")
    monkeypatch.setattr(page, "FOLDER", tmp_path / "studies")
    start, end = page.section("mine").start, page.section("mine").end
    page.PAGE.write_text(f"before\n{start}\nan older report\n{end}\nafter\n")
    (tmp_path / "summary.json").write_text(json.dumps(summarise(results)))
    page.publish("somewhere/mine.yml", str(tmp_path))
    text = page.PAGE.read_text()
    assert (
        text.startswith("before\n")
        and text.endswith("after\n")
        and "an older report" not in text
        and "| 1 | wide <x> |" in text
    )
    assert page.published() == ["mine"] and page.section("mine").written() == page.body("mine")
    for picture in re.findall(r"\]\((studies/[^)]+)\)", text):
        assert (tmp_path / picture).exists()
    with pytest.raises(Exception, match="add them for a new study"):
        page.publish("other.yml", str(tmp_path))


def test_the_study_in_the_docs_and_those_that_ship(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "sweeps.md").read_text()
    example = text[text.index("    name: narrow or wide") : text.index("| key |")]
    found = study_of(yaml.safe_load(example))
    assert len(found.variants) == 6 and found.settings["num_attention_heads"] == 6
    shipped = sorted((ROOT / "tools/head_dim/studies").glob("*.yml"))
    assert shipped
    for path in shipped:
        assert len(load_study(str(path)).variants) > 1, path
