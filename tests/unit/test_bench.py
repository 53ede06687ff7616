"""The benchmarks' own arithmetic: workers, ratios, limits, shapes, reports. No time is asserted."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from megatron import costs
from megatron.convert.families import FAMILIES
from megatron.neox_arguments import NeoXArgs
from tests.helpers import tolerances
from tools.bench import all as every
from tools.bench import attention_bench, limits, loss_bench, memory_bench, performance_page, report, train_bench
from tools.bench.shapes import FAST, QWEN3_65M, hf_config, settings
from tools.bench.workers import Worker, WorkerError, interleaved, median, median_ratio

TOYS = "tests.helpers.bench_targets"
MEBIBYTE = 1 << 20
SMALL = dict(
    num_layers=2, hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=24, ffn_hidden_size=112,
    padded_vocab_size=160, no_weight_tying=True, seq_length=24, max_position_embeddings=24,
)  # fmt: skip


def test_a_worker_answers_with_what_its_step_returns():
    with Worker(f"{TOYS}:adding", {"by": 3}, {"BENCH_TEST": "set"}) as worker:
        steps = [worker.step() for _ in range(2)]
        worker.begin()
        steps.append(worker.result())
    assert [each["total"] for each in steps] == [3, 6, 9]
    assert all(each["variable"] == "set" and each["seconds"] > 0 for each in steps)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="only Linux forgets a process's peak")
def test_the_peak_is_that_of_one_step():
    with Worker(f"{TOYS}:growing", {"bytes": 256 * MEBIBYTE}) as worker:
        large, small, again = (worker.step() for _ in range(3))
    for step in (large, again):
        assert 250 * MEBIBYTE < step["peak_rss"] - step["rss_before"] < 300 * MEBIBYTE
    assert small["peak_rss"] - small["rss_before"] < 16 * MEBIBYTE


@pytest.mark.parametrize("at, text", (("start", "no such shape"), ("step", "out of luck")))
def test_a_worker_that_fails_says_why(at, text):
    with pytest.raises(WorkerError, match=text):
        with Worker(f"{TOYS}:failing", {"at": at}) as worker:
            worker.step()


def test_workers_end_with_the_one_who_started_them():
    code = f"from tools.bench.workers import Worker; import time; w = Worker('{TOYS}:adding', {{'by': 1}})\n"
    code += "print(w._process.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not _alive(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker was still there")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class _Recorder:
    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, iter(seconds), log

    def step(self):
        self.log.append(self.name)
        return {"seconds": next(self.seconds)}


def test_workers_take_turns_and_the_first_rounds_are_dropped():
    log = []
    found = interleaved({"a": _Recorder("a", range(9), log), "b": _Recorder("b", range(10, 19), log)}, 3, warmup=2)
    assert log == ["a", "b"] * 5
    assert [each["seconds"] for each in found["a"]] == [2, 3, 4]
    assert median(found["b"]) == 13


def test_a_ratio_is_of_the_same_round():
    """The machine becomes ten times slower; the medians alone would say 10 / 2."""
    ours, theirs = ([{"seconds": value} for value in values] for values in ((1, 10, 10), (2, 2, 20)))
    assert median_ratio(ours, theirs) == 0.5


def _steps(**seconds):
    return {name: [{"seconds": value}] for name, value in seconds.items()}


def test_lines_of_different_groups_are_compared_by_way_of_the_limit():
    limit = train_bench.LIMIT
    measured = train_bench.Measured([_steps(**{limit: 1.0, "a": 3.0, "b": 6.0}), _steps(**{limit: 2.0, "c": 4.0})])
    assert measured.ratio("a", "b") == 0.5
    assert measured.ratio("c", limit) == 2.0
    assert measured.ratio("a", "c") == 1.5
    assert measured.ratio("a", "missing") is None


def test_the_training_targets_are_of_the_right_lines():
    names = (train_bench.LIMIT, train_bench.PEER, train_bench.PEER_TUNED, train_bench.FASTEST, train_bench.PART)
    group = _steps(**dict(zip((*names, train_bench.BY_HAND), (1.0, 4.4, 3.4, 2.0, 1.7, 1.92), strict=True)))
    group[train_bench.PEER][0]["peak_rss"], group[train_bench.FASTEST][0]["peak_rss"] = 200, 90
    targets = train_bench.wanted("bfloat16", train_bench.Measured([group]))
    assert [each.measured for each in targets] == pytest.approx([1.7, 2.2, 1.7, 0.04, 0.45])
    assert all(each.met for each in targets)


def test_the_matrix_products_are_those_of_transformers_linear_layers():
    model = _peer_model(settings(SMALL))
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert sum(rows * columns for rows, columns in limits.linears(settings(SMALL))) == linear


@pytest.mark.parametrize("shape", (SMALL, QWEN3_65M), ids=("small", "65M"))
def test_both_sides_have_the_same_model(shape):
    ours = settings(shape)
    model = _peer_model(ours)
    assert sum(p.numel() for p in model.parameters()) == costs.num_parameters(NeoXArgs.from_dict(ours))
    back = FAMILIES["qwen3"].settings(model.config)
    assert {name: back[name] for name in ours if name in back} == {name: ours[name] for name in ours if name in back}
    assert {"head_dim", "ffn_hidden_size", "qk_norm_type", "rotary_emb_base", "rms_norm_epsilon"} <= set(back)


def _peer_model(ours):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**hf_config(ours)))


def test_the_step_by_hand_is_the_engines_step():
    """Else their difference were not DeepSpeed's and the loop's time."""
    given = settings(SMALL, precision="fp32", lr_decay_style="constant", warmup=0.0, weight_decay=0.0)
    given["optimizer"]["params"]["lr"] = 1e-2
    losses = {}
    for name in ("training", "without_engine"):
        with Worker(f"tools.bench.ours:{name}", given) as worker:
            losses[name] = [worker.step()["loss"] for _ in range(4)]
    assert losses["training"] == pytest.approx(losses["without_engine"], abs=tolerances.TRAJECTORY)
    assert losses["training"][3] < losses["training"][0] - 0.1


def test_the_fast_settings_are_taken():
    args = NeoXArgs.from_dict(settings(SMALL, **FAST))
    assert args.compile is True and args.fused_loss_chunk == FAST["fused_loss_chunk"]


@pytest.mark.parametrize("ranks", (1, 2))
def test_the_losses_compared_are_the_same(ranks):
    given = dict(vocabulary=60, precision="float32", chunk=300, rank=0, ranks=1)
    loss = loss_bench.whole(given)()["loss"]
    assert loss == pytest.approx(loss_bench.peer(given)()["loss"], abs=tolerances.LOSS)
    name = loss_bench.FUSED if ranks == 1 else loss_bench.FUSED_TP
    assert loss == pytest.approx(loss_bench.measured(name, given, 1)["loss"], abs=tolerances.LOSS)


@pytest.mark.parametrize("most, measured, met", ((True, 1.0, True), (True, 1.1, False), (False, 0.9, False)))
def test_a_target_is_met_on_its_side(most, measured, met):
    assert report.Target("x", 1.0, measured, most).met is met
    assert report.Target("x", 1.0, None, most).met is None


def test_a_report_is_a_table_a_json_and_a_picture(tmp_path, capsys):
    rows = [{"line": "a", "x": 1234.5}, {"line": "b", "y": 0.01234}]
    report.report(
        str(tmp_path), "some", "a title", rows, targets=[report.Target("goal", 2.0, 3.0)], picture=report.bars("x", "x")
    )
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("a title", "1234", "0.0123", "goal", "<= 2", "not met"))
    content = json.loads((tmp_path / "some.json").read_text())
    assert content["rows"] == rows and content["targets"][0]["met"] is False
    assert content["machine"]["cores"] >= 1 and os.uname().nodename not in json.dumps(content["machine"])
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setitem(every.SHORT, "nowhere", every.Short("nowhere", 1, []))
    monkeypatch.setitem(every.SHORT, "long", every.Short("loss", 60, []))
    monkeypatch.setitem(every.SHORT, "hanging", every.Short("hanging", 1, []))
    for name in ("nowhere", "hanging", "long"):
        old = {"targets": [report.Target("old", 1.0, 1.0)._asdict()]}
        (tmp_path / f"{name}.json").write_text(json.dumps(old))
    found = [report.Target("kept", 1.0, 0.5)._asdict()]

    def run(command, timeout):
        if "tools.bench.nowhere_bench" in command:
            return real(command, timeout=timeout)
        if "tools.bench.hanging_bench" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        (tmp_path / "loss.json").write_text(json.dumps({"targets": found}))
        return subprocess.CompletedProcess(command, 0)

    real = subprocess.run
    monkeypatch.setattr(every.subprocess, "run", run)
    monkeypatch.setitem(every.SHORT, "loss", every.Short("loss", 1, []))
    arguments = ["--only", "nowhere", "hanging", "loss", "long", "--out", str(tmp_path), "--minutes", "0.5"]
    assert every.main(arguments) == 1
    content = json.loads((tmp_path / "summary.json").read_text())
    assert [(row["benchmark"], row["target"], row["measured"], row[""]) for row in content["rows"]] == [
        ("loss", "kept", 0.5, "met")
    ]
    results = [every.FAILED, every.CUT, "done", every.LATE]
    assert [row["result"] for row in content["benchmarks"]] == results
    assert every.main(["--only", "loss", "long", "--out", str(tmp_path), "--minutes", "0.5"]) == 0


def test_every_short_form_is_a_benchmark_that_takes_its_arguments():
    folder = os.path.dirname(every.__file__)
    assert all(os.path.exists(os.path.join(folder, f"{short.module}_bench.py")) for short in every.SHORT.values())
    assert sum(short.seconds for short in every.SHORT.values()) + every.MARGIN < 15 * 60
    for module in (train_bench, memory_bench, loss_bench, attention_bench):
        name = module.__name__.split(".")[-1].removesuffix("_bench")
        for short in (short for short in every.SHORT.values() if short.module == name):
            with pytest.raises(SystemExit) as ended:
                module.main([*short.arguments, "--help"])
            assert ended.value.code == 0


def test_attention_grows_linearly_or_not():
    rows = [{"kernel": kernel, "tokens": t, "MiB": size(t)} for kernel, size in _SIZES.items() for t in (1000, 2000)]
    first, second = attention_bench.targets(rows)
    assert (first.measured, first.met) == (1.0, True)
    assert (second.measured, second.met) == (2.0, False)


_SIZES = {"flash": lambda tokens: tokens / 10, "chunked": lambda tokens: tokens**2, "global": lambda tokens: tokens}


def test_the_page_has_a_place_for_every_part():
    for part in performance_page.PARTS:
        assert performance_page.section(part).written()
