"""What a run shows and writes: intervals, JSON lines after a kill or a resume, bar, curve, TensorBoard."""

import io
import json
import logging
import sys
from types import SimpleNamespace

import pytest

from megatron.errors import ConfigError
from megatron.logging import RunLog, TrainingLogger, quiet_libraries, read_records, run_folder, tee_output
from megatron.logging.console import Console, _is_terminal, short_number, step_line
from megatron.logging.curve import draw_loss_curve
from megatron.logging.quiet import without_library_prints


def arguments(**changes):
    settings = dict(
        log_dir=None, save=None, tensorboard_dir=None, use_wandb=None, wandb_init_all_ranks=False,
        log_interval=2, train_iters=5, train_batch_size=4, seq_length=8, peak_theoretical_tflops=None,
        wall_clock_breakdown=False, dump_state=False,
    )  # fmt: skip
    return SimpleNamespace(**{**settings, **changes})


def metrics(loss, seconds=0.5, **more):
    return dict(loss=loss, lr=1e-3, grad_norm=2.0, seconds=seconds, **more)


def test_intervals_and_rates(tmp_path, capsys):
    """Two steps a line, the last step too; numbers from the definitions."""
    args = arguments(log_dir=str(tmp_path), peak_theoretical_tflops=1e-9)
    logger = TrainingLogger(args, flops_per_token=10.0)
    for iteration, loss in enumerate([4.0, 2.0, 3.0, 1.0, 0.5], 1):
        waited = {"data_seconds": 0.001 * iteration} if iteration < 5 else {}
        logger.log_step(iteration, metrics(loss, seconds=0.25 if iteration % 2 else 0.75, **waited))
    logger.close()
    records = read_records(tmp_path / "train_log.jsonl")
    assert [(r["iteration"], r["loss"]) for r in records] == [(2, 3.0), (4, 2.0), (5, 0.5)]
    assert records[0]["seconds"] == 0.5
    assert [r["data_ms"] for r in records] == pytest.approx([1.5, 3.5, 0.0])
    assert records[0]["tokens_per_second"] == 4 * 8 / 0.5
    assert records[0]["tflops"] == pytest.approx(64 * 10 / 1e12)
    assert records[0]["mfu"] == pytest.approx(0.64)
    assert records[0]["lr"] == 1e-3 and records[0]["grad_norm"] == 2.0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and "iteration 2/5 | loss 3.0000 | lr 0.001 | grad norm 2" in shown[0]
    assert "64 tokens/s" in shown[0] and "ETA 0:00:02" in shown[0]


def test_skipped_steps_do_not_count(tmp_path):
    logger = TrainingLogger(arguments(save=str(tmp_path)))
    logger.log_step(1, metrics(float("inf"), skipped=True))
    logger.log_step(2, metrics(3.0))
    logger.log_step(3, metrics(9.0, skipped=True))
    logger.log_step(4, metrics(float("nan"), skipped=True))
    logger.close()
    first, second = read_records(tmp_path / "train_log.jsonl")
    assert first["loss"] == 3.0 and first["skipped_steps"] == 1
    assert second["loss"] is None and second["skipped_steps"] == 2  # NaN is null: JSON has none


def test_nothing_written_without_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = TrainingLogger(arguments())
    logger.log_step(2, metrics(1.0))
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_run_folder():
    assert run_folder(arguments(log_dir="a", save="b")) == "a"
    assert run_folder(arguments(save="b")) == "b"
    assert run_folder(arguments()) is None


def test_torn_line_is_dropped(tmp_path):
    path = tmp_path / "train_log.jsonl"
    path.write_text('{"iteration": 1, "loss": 2.0}\n{"iteration": 2, "lo')
    assert [r["iteration"] for r in read_records(path)] == [1]
    log = RunLog(str(tmp_path))
    log.write({"iteration": 2, "loss": 1.0})
    log.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]


def test_resume_replaces_what_is_done_again(tmp_path):
    log = RunLog(str(tmp_path))
    for iteration in range(1, 8):
        log.write({"iteration": iteration, "loss": 10.0 + iteration})
        if iteration % 2 == 0:
            log.write({"iteration": iteration, "valid_loss": 20.0 + iteration})
    log.close()
    log = RunLog(str(tmp_path))  # killed at 7, resumed from the checkpoint of step 4
    for iteration in (5, 6):
        log.write({"iteration": iteration, "loss": 30.0 + iteration})
    log.write({"iteration": 6, "valid_loss": 40.0})
    log.close()
    records = read_records(log.path)
    losses = {r["iteration"]: r["loss"] for r in records if "loss" in r}
    assert losses == {1: 11.0, 2: 12.0, 3: 13.0, 4: 14.0, 5: 35.0, 6: 36.0}
    assert {r["iteration"]: r["valid_loss"] for r in records if "valid_loss" in r} == {2: 22.0, 4: 24.0, 6: 40.0}
    assert len(open(log.path).readlines()) == 13  # nothing was rewritten


def test_resume_at_the_same_iteration(tmp_path):
    """A finished run that is started again evaluates again; its last step stays."""
    log = RunLog(str(tmp_path))
    for record in ({"loss": 1.0}, {"valid_loss": 2.0}, {"test_loss": 3.0}, {"valid_loss": 4.0}, {"test_loss": 5.0}):
        log.write({"iteration": 3, **record})
    log.close()
    records = [{key: value for key, value in r.items() if key != "iteration"} for r in read_records(log.path)]
    assert records == [{"loss": 1.0}, {"valid_loss": 4.0}, {"test_loss": 5.0}]


def test_progress_bar(monkeypatch):
    """On a terminal: the bar with its figures; a message does not tear it."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console = Console(10, iteration=4, interactive=True)
    record = dict(iteration=6, loss=1.5, lr=1e-3, grad_norm=None, tokens_per_second=12345.0, tflops=0.25, seconds=1.0)
    console.advance(6)
    console.step(record)
    console.message("saved")
    console.close()
    shown = stream.getvalue()
    assert "6/10" in shown and "loss 1.5000" in shown and "12.3k tokens/s" in shown and "0.25 TFLOP/s" in shown
    assert "saved\n" in shown


def test_step_line_is_complete():
    record = dict(
        iteration=5, loss=1.5, lr=1e-3, grad_norm=0.5, loss_scale=1024.0, skipped_steps=1, tokens_per_second=2e6,
        tflops=123.4, mfu=0.456, seconds=2.0,
    )  # fmt: skip
    assert step_line(record, 1000) == (
        "iteration    5/1000 | loss 1.5000 | lr 0.001 | grad norm 0.5 | loss scale 1.02e+03 | 1 skipped | "
        "2M tokens/s | 123 TFLOP/s | MFU 45.6% | 2 s/step | ETA 0:33:10"
    )


@pytest.mark.parametrize("value, text", [(1, "1"), (999, "999"), (12345, "12.3k"), (4.56e6, "4.56M"), (7e9, "7G")])
def test_short_number(value, text):
    assert short_number(value) == text


def test_tee(tmp_path, capsys):
    with tee_output(str(tmp_path), rank=3):
        print("first line")
        print("problem", file=sys.stderr)
        sys.stdout.file_only("hidden\n")
    print("after")
    out, err = sorted(tmp_path.iterdir(), key=lambda path: path.name, reverse=True)
    assert out.name.endswith("_rank3_stdout.txt") and out.read_text() == "first line\nhidden\n"
    assert err.read_text() == "problem\n"
    captured = capsys.readouterr()
    assert captured.out == "first line\nafter\n" and captured.err == "problem\n"


def test_tee_without_log_dir(capsys):
    with tee_output(None):
        print("plain")
    assert capsys.readouterr().out == "plain\n"


def test_loss_curve(tmp_path):
    records = [{"iteration": i, "loss": 5.0 / i} for i in range(1, 100)]
    records += [{"iteration": 50, "valid_loss": 0.2}, {"iteration": 99, "valid_loss": 0.1, "loss": None}]
    path = draw_loss_curve(records, str(tmp_path), "a run")
    assert open(path, "rb").read(8) == b"\x89PNG\r\n\x1a\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["loss_curve.png"]
    assert draw_loss_curve([], str(tmp_path)) is None


def test_curve_axes_and_labels(tmp_path, monkeypatch):
    """Both curves with the right points, units on both axes."""
    from matplotlib.figure import Figure

    seen = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (seen.update(figure=self), open(path, "w").close()))
    records = [{"iteration": 1, "loss": 3.0}, {"iteration": 2, "loss": 2.0}, {"iteration": 2, "valid_loss": 2.5}]
    draw_loss_curve(records, str(tmp_path))
    (axes,) = seen["figure"].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"training": [[1.0, 3.0], [2.0, 2.0]], "validation": [[2.0, 2.5]]}
    draw_loss_curve([{"iteration": i, "loss": 100.0 - i} for i in range(1, 91)], str(tmp_path))
    _, smooth = seen["figure"].axes[0].get_lines()  # the mean of a straight line lies on it
    assert (smooth.get_xdata() + smooth.get_ydata() == pytest.approx(100.0)) and len(smooth.get_xdata()) == 86
    assert len({line.get_color() for line in axes.get_lines()}) == 2
    assert axes.get_xlabel() == "iteration (optimizer steps)"
    assert axes.get_ylabel() == "cross-entropy loss (nats per token)"


def test_tensorboard(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TrainingLogger(arguments(tensorboard_dir=str(tmp_path), log_interval=1))
    logger.log_step(1, metrics(3.0, scalars={"gradient_norms/a": 0.5}))
    logger.log_step(2, metrics(float("nan")))
    logger.log_eval(2, {"loss": 2.5, "ppl": 12.18})
    logger.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/lm_loss")] == [(1, 3.0)]
    assert events.Scalars("gradient_norms/a")[0].value == 0.5
    assert events.Scalars("validation/lm_loss")[0].value == 2.5
    assert len(events.Scalars("train/learning_rate")) == 2


def test_wandb_missing_is_named():
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="requirements-wandb.txt"):
            TrainingLogger(arguments(use_wandb=True))


def test_wandb_gets_names_and_figures(monkeypatch):
    """With a stand-in for the package: what we call it with."""
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    wandb = SimpleNamespace(init=lambda **settings: calls.append(settings) or Run())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_BASE_URL", "https://kept.example")
    args = arguments(
        use_wandb=True, wandb_project="p", wandb_team="t", wandb_group="g", wandb_run_name="n",
        wandb_host="https://example.org", to_dict=lambda: {"seed": 1},
    )  # fmt: skip
    logger = TrainingLogger(args)
    logger.log_step(2, metrics(1.0))
    logger.close()
    assert calls[0] == dict(project="p", entity="t", group="g", name="n", config={"seed": 1})
    assert calls[1][0] == 2 and calls[1][1]["train/lm_loss"] == 1.0
    assert calls[-1] == "finish"


def test_quiet(capsys):
    logging.getLogger("DeepSpeed").setLevel(logging.INFO)
    quiet_libraries(arguments(dump_state=True))
    assert logging.getLogger("DeepSpeed").level == logging.INFO
    quiet_libraries(arguments())
    assert logging.getLogger("DeepSpeed").level == logging.WARNING
    texts = ("checkpoint is damaged", "**** You are using ZeRO with an untested optimizer, proceed with caution *****")
    records = [logging.makeLogRecord({"msg": text}) for text in texts]
    passed = [bool(logging.getLogger("DeepSpeed").filter(record)) for record in records]
    assert passed == [True, False]
    noise = "Using topology: {}\nstage=0 layers=7\n     0: EmbeddingPipe\n  loss: CrossEntropy\n"
    with without_library_prints(arguments()):
        print(noise + "a warning of ours")
        print("unfinished", end="")
    assert capsys.readouterr().out == "a warning of ours\nunfinished"
    with without_library_prints(arguments(wall_clock_breakdown=True)):
        print(noise, end="")
    assert capsys.readouterr().out == noise


def test_terminal_without_a_size_gets_lines():
    """Some CI systems give a terminal of 0 x 0, on which tqdm shows nothing."""
    import fcntl
    import os
    import struct
    import termios

    master, slave = os.openpty()
    with os.fdopen(master, "rb", buffering=0), os.fdopen(slave, "w") as stream:
        fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("4H", 0, 0, 0, 0))
        assert not _is_terminal(stream)
        fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        assert _is_terminal(stream)
    assert not _is_terminal(io.StringIO())
