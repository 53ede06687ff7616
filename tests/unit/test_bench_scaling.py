"""The scaling study, the data and start-up benchmarks and the GPU script: what they measure and how they count it."""

import os
import stat
import subprocess
import sys

import pytest

from megatron import costs
from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_values
from tests.helpers.geometries import WIDE_NON_DIVISIBLE
from tools.bench import data_bench, gpu_bench, scaling_bench, scaling_page, scaling_shapes, startup_bench
from tools.bench.workers import Worker

GPU_SCRIPT = os.path.join(os.path.dirname(gpu_bench.__file__), "gpu.sh")


def _arguments(values):
    return NeoXArgs.from_dict(values)


def _without_head_norms(args):
    """The norm of queries and that of keys have a weight for each dimension of a head."""
    return costs.num_parameters(args) - args.num_layers * 2 * args.head_dim


@pytest.mark.parametrize("make", (scaling_shapes.same_width, scaling_shapes.same_heads))
def test_models_of_every_head_dim_have_equal_parameters(make):
    models = [_arguments(values) for values in make().values()]
    assert [args.head_dim for args in models] == [64, 128, 256]
    assert len({_without_head_norms(args) for args in models}) == 1


def test_only_the_wider_attention_costs_more_operations():
    """Per token 12 · n·d · s for each layer, forward and backward, beside what all have in common."""
    equal = {costs.flops_per_token(_arguments(values)) for values in scaling_shapes.same_width().values()}
    assert len(equal) == 1
    wider = {int(width): costs.flops_per_token(_arguments(v)) for width, v in scaling_shapes.same_heads().items()}
    layers, heads, length = scaling_shapes.SMALL["num_layers"], 8, 1024
    for width in (128, 256):
        assert wider[width] - wider[64] == pytest.approx(12 * layers * heads * (width - 64) * length)


def test_a_curve_is_relative_to_its_first_point():
    models = scaling_shapes.lengths()
    figures = {name: [{"seconds": (2.0 + number) * drift} for drift in (1, 2, 9)] for number, name in enumerate(models)}
    rows = scaling_bench.curve("length", models, figures)
    small = scaling_shapes.SMALL
    hidden, width, kv = small["hidden_size"], 4 * small["head_dim"], 2 * small["head_dim"]
    products = hidden * (2 * width + 2 * kv) + 3 * hidden * small["ffn_hidden_size"]
    for number, (row, length) in enumerate(zip(rows, scaling_shapes.LENGTHS, strict=True)):
        per_token = 6 * (small["num_layers"] * products + hidden * small["padded_vocab_size"])
        causal = per_token + 12 * small["num_layers"] * width * (length + 1) / 2
        assert row["causal GFLOP/s"] == pytest.approx(causal * 4096 / (4.0 + 2 * number) / 1e9)
        assert row["tokens/s"] == pytest.approx(4096 / (4.0 + 2 * number))
        assert row["time / first"] == pytest.approx((2.0 + number) / 2.0)
    assert rows[0]["FLOPs / first"] == rows[0]["causal FLOPs / first"] == 1.0
    assert rows[-1]["FLOPs / first"] > rows[-1]["causal FLOPs / first"] > 1.0


def test_layouts_do_the_same_work():
    """The tokens of a step of all replicas, on the two cores there are."""
    for arguments, processes, threads in scaling_shapes.layouts().values():
        args = _arguments(arguments)
        assert args.train_batch_size * args.seq_length == 1024
        assert args.global_num_gpus == processes
        assert processes * threads <= 2


def in_a_worker(target, settings):
    """The points of one step, in a process of its own: an engine leaves states behind that other tests would meet."""
    with Worker(f"tools.bench.scaling_steps:{target}", settings, {"OMP_NUM_THREADS": "1"}) as worker:
        return worker.step()["points"]


def test_steps_train_and_decode():
    values = tiny_values(**WIDE_NON_DIVISIBLE, global_num_gpus=1)
    trained = in_a_worker("training_steps", {"models": {"a": values, "b": {**values, "num_layers": 1}}})
    assert set(trained) == {"a", "b"}
    assert all(each["seconds"] > 0 and each["peak_rss"] >= each["rss_before"] > 0 for each in trained.values())
    decoded = in_a_worker("decoding", {"models": {"a": values}, "batch": 3, "prompt": 10, "new": 6})["a"]
    assert decoded["seconds"] > 0
    assert decoded["cache_bytes"] == costs.kv_cache_bytes(_arguments(values), 3, 15)


def test_ranks_step_together_and_each_says_its_memory(tmp_path):
    """Under ZeRO 1 both keep half of the optimizer's state; 8 MB of weights make that more than what else is held."""
    values = tiny_values(
        hidden_size=256, num_attention_heads=2, padded_vocab_size=16384, global_num_gpus=2,
        zero_optimization={"stage": 1},
    )  # fmt: skip
    settings = {"arguments": values, "world_size": 2, "store": str(tmp_path / "store")}
    with Worker("tools.bench.scaling_steps:ranks", settings, {"OMP_NUM_THREADS": "1"}) as worker:
        worker.step()
        held = worker.step()["rank_bytes"]
    weights = 4 * costs.num_parameters(_arguments(values))
    assert len(held) == 2
    assert all(each > 2 * weights for each in held)


def test_an_iterator_says_how_long_it_was_waited_for(monkeypatch):
    clock = iter([1.0, 3.5, 10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr(data_bench.time, "perf_counter", lambda: next(clock))
    batches = data_bench.Waiting(iter("ab"))
    assert [next(batches), next(batches)] == ["a", "b"]
    assert batches.seconds == 2.75
    with pytest.raises(StopIteration):
        next(batches)


def test_both_ways_to_tokens_give_the_same_number(tmp_path):
    data_bench.prepare(str(tmp_path), 60_000)
    settings = {"folder": str(tmp_path), "name": "it"}
    counts = [
        make({**settings, "workers": workers})()["tokens"]
        for make, workers in ((data_bench.bare, 1), (data_bench.bare, 2), (data_bench.preprocessing, 1))
    ]
    assert counts[0] > 10_000
    assert len(set(counts)) == 1


def test_a_start_ends_with_the_wanted_line():
    assert startup_bench.seconds(["-c", "print('other'); print('iteration 1/1')"], startup_bench.FIRST_STEP) > 0
    with pytest.raises(startup_bench.StartError, match="without a line.*\n.*other"):
        startup_bench.seconds(["-c", "print('other')"], startup_bench.FIRST_STEP)
    with pytest.raises(startup_bench.StartError, match="exit code 3"):
        startup_bench.seconds(["-c", "raise SystemExit(3)"])


@pytest.mark.parametrize("variant", gpu_bench.VARIANTS)
@pytest.mark.parametrize("size", ([], ["--tiny"]))
def test_gpu_models_are_valid(variant, size):
    options = gpu_bench.parse(size)
    args = _arguments(gpu_bench.model(options, 2, variant))
    assert args.distributed_backend == "nccl"
    assert args.attention_config == [variant if variant in ("flash", "chunked") else "auto"] * 2
    assert costs.memory_per_rank(args).total > 2 * costs.num_parameters(args)


def test_gpu_rows_count_true_operations():
    """Of 8 layers of Qwen3-4B: hidden 2560, query width 4096, key/value width 1024, MLP 9728, vocabulary 151936."""
    args = _arguments(gpu_bench.model(gpu_bench.parse([]), 8, "flash"))
    found = {"bare matrix products": [{"seconds": 1.0}], "flash": [{"seconds": 2.0}]}
    row = gpu_bench.train_row("flash", found["flash"], args, 100.0, found)
    products = 8 * (2560 * (2 * 4096 + 2 * 1024) + 3 * 2560 * 9728) + 2560 * 151936
    scores = 8 * 2 * 4096
    assert row["TFLOP/s"] == pytest.approx(6 * (products + scores * 4096) * 2048 / 1e12)
    assert row["causal TFLOP/s"] == pytest.approx(6 * (products + scores * 4097 / 2) * 2048 / 1e12)
    assert row["MFU"] == pytest.approx(row["TFLOP/s"] / 100.0)
    assert (row["x products"], row["x transformers"]) == (2.0, None)


def test_gpu_decoding_reads_weights_and_cache():
    args = _arguments(gpu_bench.model(gpu_bench.parse([]), 8, "flash"))
    weights = 8 * (2560 * (2 * 4096 + 2 * 1024) + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128) + 2560 * 151936 + 2560
    cache = 8 * 2 * 1024 * 4 * (64 + 64)
    row = gpu_bench.decode_row(4, 0.01, args, 1e12)
    assert row["of the limit"] == pytest.approx(2 * (weights + cache) / 1e12 / 0.01)
    assert row["tokens/s"] == pytest.approx(400)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_peaks_of_devices_by_their_own_names(name, peak):
    assert gpu_bench.published_tflops(name) == peak


def test_gpu_script_says_why_it_does_not_run(tmp_path):
    """With a Python whose torch sees no GPU."""
    assert os.stat(GPU_SCRIPT).st_mode & stat.S_IXUSR
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([GPU_SCRIPT, str(tmp_path / "out")], env=environment, capture_output=True, text=True)
    assert run.returncode == 2
    assert "skipped: no GPU: torch.cuda.is_available() is False" in run.stderr
    assert not (tmp_path / "out").exists()


def test_page_has_a_place_for_every_part():
    for part in scaling_page.PARTS:
        scaling_page.section(part).written()


def test_page_tables_have_every_column():
    rows = [{"a": 1.2345, "b": "x"}, {"a": None, "c": 250.4}]
    assert scaling_page.table(rows) == "| a | b | c |\n| --- | --- | --- |\n| 1.23 | x |  |\n|  |  | 250 |"
