"""Claims: each one's three verdicts on made figures, what is left out and why, the page and its pictures."""

import copy
import json
import math
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from megatron.neox_arguments.loading import parse
from tools.head_dim.__main__ import main
from tools.head_dim.claims import page
from tools.head_dim.claims.claims import CLAIMS, Range, studies
from tools.head_dim.claims.command import ROOT, STUDIES, study_named
from tools.head_dim.claims.figures import figures_of
from tools.head_dim.claims.measures import Measured
from tools.head_dim.claims.pictures import figure_of
from tools.head_dim.claims.verdict import NOT_SEEN, SEEN, UNDECIDED, judge, judge_all

BY_NAME = {claim.name: claim for claim in CLAIMS}
WIDTHS = (8, 16, 32, 64)
RATES = (0.002, 0.004, 0.008, 0.016, 0.032)
SEEDS = (1, 2, 3)
WIGGLE = {1: -1.0, 2: 0.0, 3: 1.0}
"""The seeds differ by this times a spread: mean and deviation are known."""


def run(variant, seed, loss=4.0, heads=None, grad_norm=1.0):
    looks = {name: {"mean": values, "most": [2 * value for value in values]} for name, values in (heads or {}).items()}
    status = "finished" if loss is not None else "diverged"
    norms = dict(grad_norm=grad_norm, first_grad_norm=2 * grad_norm)
    return dict(variant=variant, seed=seed, status=status, loss=loss, **norms, looks=[40, 80], heads=looks)


def study(variants, runs):
    listed = [dict(name=n, changes=c, widths={"head_dim": w}, parameters=9) for n, c, w in variants]
    return dict(name="made", about="Made.", seeds=list(SEEDS), variants=listed, runs=runs)


def widths_study(rank=lambda width, seed: 20.0, gradient=lambda width, seed: 0.1):
    variants = [(f"head_dim {width}", {"head_dim": width}, width) for width in WIDTHS]
    runs = [
        run(
            f"head_dim {width}", seed,
            heads={
                "attention_rank": [99.0, rank(width, seed)], "score_rank": [1.0, width / 4],
                "gradient_norm": [gradient(width, seed)] * 2,
            },
        )
        for seed in SEEDS for width in WIDTHS
    ]  # fmt: skip
    return study(variants, runs)


def rank_study(factor, spread):
    return widths_study(rank=lambda width, seed: 10 * (factor + spread * WIGGLE[seed]) ** math.log2(width))


def gradient_study(ratio, spread):
    return widths_study(gradient=lambda width, seed: 0.1 * (ratio + spread * WIGGLE[seed]) ** (math.log(width / 16, 4)))


def rate_study(exponent, spread, best=None):
    """Losses on parabolas over log2(rate), lowest at best x (width / 8) ** exponent for each seed; by default both of
    them are in the middle of what is tried."""
    best = best or 0.008 * 8 ** (-exponent / 2)
    variants, runs = [], []
    for width in (8, 64):
        for rate in RATES:
            name = f"head_dim {width}, lr {rate:g}"
            variants.append((name, {"head_dim": width, "optimizer.params.lr": rate}, width))
            for seed in SEEDS:
                lowest = best * (width / 8) ** (exponent + spread * WIGGLE[seed])
                runs.append(run(name, seed, loss=3 + 0.1 * math.log2(rate / lowest) ** 2))
    return study(variants, runs)


def gain_study(claim, gained, spread):
    names = {
        "rotary": ("rotary_denominator_scale 1", "rotary_denominator_scale 1.5"),
        "depth": ("the same in all layers", "growing"),
    }[claim]
    losses = lambda name, seed: 4 + 0.3 * seed - (gained + spread * WIGGLE[seed] if name == names[1] else 0)  # noqa: E731
    return study([(name, {}, 16) for name in names], [run(n, s, losses(n, s)) for s in SEEDS for n in names])


# claim: {verdict: (figures, the mean that was put in)}; spreads of seeds are a 2.48th of the half interval
CASES = {
    "rank": {
        SEEN: (rank_study(1.4, 0.05), 1.4),
        NOT_SEEN: (rank_study(1.02, 0.01), 1.02),
        UNDECIDED: (rank_study(1.15, 0.1), 1.15),
    },
    "gradients": {
        SEEN: (gradient_study(4.0, 0.2), 4.0),
        NOT_SEEN: (gradient_study(2.0, 0.2), 2.0),
        UNDECIDED: (gradient_study(3.2, 0.5), 3.2),
    },
    "learning_rate": {
        SEEN: (rate_study(0.5, 0.02), 0.5),
        NOT_SEEN: (rate_study(-0.5, 0.02), -0.5),
        UNDECIDED: (rate_study(0.3, 0.1), 0.3),
    },
    "rotary": {
        SEEN: (gain_study("rotary", 0.03, 0.005), 0.03),
        NOT_SEEN: (gain_study("rotary", 0.0, 0.003), 0.0),
        UNDECIDED: (gain_study("rotary", 0.02, 0.02), 0.02),
    },
    "depth": {
        SEEN: (gain_study("depth", 0.03, 0.005), 0.03),
        NOT_SEEN: (gain_study("depth", -0.05, 0.005), -0.05),
        UNDECIDED: (gain_study("depth", 0.0, 0.02), 0.0),
    },
}


@pytest.mark.parametrize("verdict", [SEEN, NOT_SEEN, UNDECIDED])
@pytest.mark.parametrize("claim", BY_NAME)
def test_verdicts(claim, verdict):
    figures, mean = CASES[claim][verdict]
    found = judge(BY_NAME[claim], figures)
    assert found.verdict == verdict, found.sentence
    assert found.mean == pytest.approx(mean, abs=1e-6) and found.measured.left_out == {}
    assert found.sentence.lower().startswith(f"{verdict}.") and f"{found.mean:.3g}" in found.sentence
    assert str(BY_NAME[claim].wanted) in found.sentence


def test_tables():
    """What the page shows beside the numbers that decide: means over seeds, by hand."""
    rows = BY_NAME["gradients"].measure(CASES["gradients"][SEEN][0]).rows
    assert [row["head_dim"] for row in rows] == list(WIDTHS)
    shown = [row["gradient norm of a head / that at 16"] for row in rows]
    wide = (3.8 * 4.0 * 4.2) ** (1 / 3)
    assert shown == pytest.approx([wide**-0.5, 1, wide**0.5, wide]) and rows[3]["square root of the width"] == 2
    rows = BY_NAME["rank"].measure(CASES["rank"][SEEN][0]).rows
    assert rows[1]["effective rank of attention"] == pytest.approx(10 * (1.35**4 + 1.4**4 + 1.45**4) / 3)
    assert [row["effective rank of the scores"] for row in rows] == [2, 4, 8, 16] and rows[3]["most of any head"] == 32
    narrow, wide = BY_NAME["learning_rate"].measure(CASES["learning_rate"][SEEN][0]).rows
    assert narrow["best rate"] == pytest.approx(0.008 / 8**0.25) and wide["loss at 0.032"] > wide["loss at 0.016"]
    assert [row["lower by, mean over seeds"] for row in BY_NAME["depth"].measure(CASES["depth"][SEEN][0]).rows] == [
        0,
        pytest.approx(0.03),
    ]


def test_the_interval_is_students_of_the_seeds():
    found = judge(BY_NAME["depth"], CASES["depth"][SEEN][0])
    half = 4.302652730 * 0.005 / math.sqrt(3)  # t of two degrees of freedom at 97.5 %; three values one spread apart
    assert found.interval == pytest.approx((0.03 - half, 0.03 + half), abs=1e-8)


def test_an_interval_beyond_the_upper_end_is_not_seen():
    assert judge(BY_NAME["learning_rate"], rate_study(0.9, 0.01)).verdict == NOT_SEEN
    assert str(Range(0.25, 0.75)) == "0.25 to 0.75" and str(Range(3.0, math.inf)) == "3 or more"


def test_seeds_without_a_number_are_named():
    figures = copy.deepcopy(CASES["depth"][SEEN][0])
    next(r for r in figures["runs"] if (r["variant"], r["seed"]) == ("growing", 2)).update(loss=None, status="diverged")
    found = judge(BY_NAME["depth"], figures)
    assert found.verdict == UNDECIDED and found.interval is None and set(found.measured.effects) == {1, 3}
    assert found.measured.left_out == {2: "a run did not finish"} and "2 of 3 seeds" in found.sentence

    figures = copy.deepcopy(CASES["rank"][SEEN][0])
    figures["runs"][0]["heads"] = {}
    assert list(BY_NAME["rank"].measure(figures).left_out) == [1]
    figures["runs"][1]["heads"] = {}
    assert list(BY_NAME["gradients"].measure(figures).left_out) == [1]


@pytest.mark.parametrize("exponent, best, why", [(0.5, 0.012, "head_dim 64"), (0.0, 0.001, "head_dim 8 and 64")])
def test_a_best_rate_at_the_end_of_those_tried_is_none(exponent, best, why):
    measured = BY_NAME["learning_rate"].measure(rate_study(exponent, 0.0, best=best))
    assert measured.effects == {} and set(measured.left_out) == set(SEEDS)
    assert all(reason.startswith(why + ":") for reason in measured.left_out.values())


def test_a_best_rate_beside_one_that_diverged_is_none():
    figures = rate_study(0.0, 0.0)
    for each in figures["runs"]:
        if each["variant"] == "head_dim 8, lr 0.016" and each["seed"] == 1:
            each["loss"] = None
    measured = BY_NAME["learning_rate"].measure(figures)
    assert set(measured.effects) == {2, 3} and measured.left_out[1].startswith("head_dim 8:")


def results():
    """A sweep's results, of two runs: one finished, one half done."""
    look = lambda iteration, scale: {  # noqa: E731
        "iteration": iteration,
        "layers": [
            {"figures": {"attention_rank": [4.0 * scale, 6.0 * scale], "gradient_norm": [1.0, 4.0], "entropy": [1.0]}},
            {"figures": {"attention_rank": [8.0 * scale, 10.0 * scale], "gradient_norm": [4.0, None]}},
        ],
    }
    runs = [
        dict(
            variant="a", seed=1, status=status, train={"step": [1, 2, 3], "grad_norm": [1.0, None, 3.0]},
            validation={"step": [1, 2], "loss": [5.0, 4.5]}, heads=heads,
        )
        for status, heads in (("finished", [look(1, 1), look(2, 2)]), ("unfinished", [look(1, 1)]))
    ]  # fmt: skip
    variant = dict(name="a", changes={}, widths={"head_dim": 8}, parameters=9, settings={"much": 1})
    return dict(study=dict(name="s", about="t", seeds=[1], settings={}), variants=[variant], runs=runs)


def test_figures_of_a_sweep():
    figures = figures_of(results())
    finished, unfinished = figures["runs"]
    assert finished["loss"] == 4.5 and finished["looks"] == [1, 2]
    assert finished["grad_norm"] == 2.0 and finished["first_grad_norm"] == 1.0
    assert finished["heads"]["attention_rank"] == {"mean": [7.0, 14.0], "most": [10.0, 20.0]}
    assert finished["heads"]["gradient_norm"]["mean"] == [None, None], "one was not finite"
    assert finished["heads"]["score_rank"]["mean"] == [None, None], "not among the figures"
    assert unfinished["loss"] is unfinished["grad_norm"] is unfinished["first_grad_norm"] is None
    assert unfinished["heads"] == {} and unfinished["looks"] == [], "an early look is no last one"
    assert "settings" not in figures["variants"][0]


def made_data():
    chosen = {claims[0].name: study for study, claims in studies().items()}
    return {"machine": {"cores": 2}, "studies": {file: CASES[claim][SEEN][0] for claim, file in chosen.items()}}


def test_page_pictures_and_data(tmp_path, capsys):
    files = page.write(made_data(), str(tmp_path))
    assert sorted(Path(path).name for path in files) == sorted(path.name for path in tmp_path.iterdir())
    text = (tmp_path / "claims.md").read_text()
    for verdict in judge_all(made_data()["studies"], CLAIMS):
        picture = f"claims_{verdict.claim.name}.png"
        assert verdict.sentence.split(". ", 1)[1] in text and f"**{verdict.verdict.capitalize()}**" in text
        assert f"({picture})" in text and (tmp_path / picture).stat().st_size > 10_000
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".png"}
    assert main(["claims", "--no-training", "--page", str(tmp_path)]) == 0
    assert "Not seen" in capsys.readouterr().out, "gradients do not grow in these figures"
    assert {name: (tmp_path / name).read_bytes() for name in before} == before, "the data gives the same page"
    assert main(["claims", "--no-training", "--page", str(tmp_path / "none")]) == 2
    assert "claims.json: no figures of claims can be read" in capsys.readouterr().err


def test_the_command_trains_each_study_once(tmp_path, monkeypatch, capsys):
    made, asked = made_data()["studies"], []

    def run_study(study, out, jobs, data_dir, discard_changed):
        asked.append((Path(out).name, study.name, jobs, Path(data_dir)))
        if len(asked) > len(made):
            raise KeyboardInterrupt
        return Path(out).name

    monkeypatch.setattr("tools.head_dim.sweep.api.run_study", run_study)
    monkeypatch.setattr("tools.head_dim.claims.figures.figures_of", made.__getitem__)
    monkeypatch.setattr("tools.head_dim.claims.pictures.draw", lambda verdict, study, folder: verdict.claim.name)
    given = ["claims", "--out", str(tmp_path / "runs"), "--page", str(tmp_path / "page"), "--jobs", "2"]
    assert main(given) == 0
    assert [each[0] for each in asked] == list(studies()) and {each[2:] for each in asked} == {
        (2, tmp_path / "runs" / "data")
    }
    assert page.read(str(tmp_path / "page"))["studies"] == made
    assert (tmp_path / "page" / "claims.md").exists() and "the claim wants 3 or more" in capsys.readouterr().out
    assert main(given) == 130 and "goes on from what is in" in capsys.readouterr().err
    made["claim_widths"]["runs"][0]["status"] = "failed"
    asked.clear()
    assert main(given) == 1


@pytest.mark.parametrize("claim", BY_NAME)
def test_panels(claim):
    verdict = judge(BY_NAME[claim], CASES[claim][UNDECIDED][0])
    left, right = figure_of(verdict, CASES[claim][UNDECIDED][0]).axes
    assert len(left.lines) >= 2 and len(right.containers) == 1
    seeds = next(line for line in right.lines if line.get_label() == "each seed")
    assert list(seeds.get_ydata()) == list(verdict.measured.effects.values())
    plt.close("all")


def test_a_picture_without_enough_seeds():
    figures = copy.deepcopy(CASES["depth"][SEEN][0])
    for each in figures["runs"]:
        each["loss"] = None
    verdict = judge(BY_NAME["depth"], figures)
    assert verdict.measured == Measured({}, {seed: "a run did not finish" for seed in SEEDS}, verdict.measured.rows)
    figure_of(verdict, figures)
    plt.close("all")


def test_the_studies_that_ship(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # they can be run from anywhere
    assert {path.stem for path in STUDIES.glob("claim_*.yml")} == set(studies())
    for name, claims in studies().items():
        found = study_named(name)
        assert len(found.seeds) >= 3 and found.settings["train_iters"] == 200
        names = {variant.name for variant in found.variants}
        assert found.baseline in names
        if claims[0].name in ("rotary", "depth"):  # whose measures go by the variants' names
            assert {each["name"] for each in CASES[claims[0].name][SEEN][0]["variants"]} == names
        assert bool(found.settings["log_head_diagnostics"]) == (name == "claim_widths")
    rates = parse((STUDIES / "claim_learning_rate.yml").read_text(), "")["vary"]
    assert rates == {"head_dim": [8, 64], "optimizer.params.lr": list(RATES)}


def test_the_page_in_the_docs_is_that_of_its_data():
    data = page.read(str(ROOT / "docs"))
    assert set(data["studies"]) == set(studies())
    for name, found in data["studies"].items():
        study = study_named(name)
        assert found["seeds"] == list(study.seeds) and found["about"] == study.about
        assert [each["name"] for each in found["variants"]] == [variant.name for variant in study.variants]
    for claim in CLAIMS:
        assert (ROOT / "docs" / f"claims_{claim.name}.png").stat().st_size > 10_000
    assert (ROOT / "docs" / page.PAGE).read_text() == page.page(data)
    assert (ROOT / "docs" / page.DATA).stat().st_size < 300_000
    kept = json.loads((ROOT / "docs" / page.DATA).read_text())["verdicts"]
    assert kept == json.loads(json.dumps([each.to_dict() for each in judge_all(data["studies"], CLAIMS)]))
