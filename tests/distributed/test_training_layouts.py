"""pretrain() end to end: losses, gradient norms and evaluation do not depend on how the model is split."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.configs import tiny_values
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import NARROW, WIDE_NON_DIVISIBLE
from tests.helpers.tolerances import TRAJECTORY

STEPS = 6
LLAMA = dict(
    **WIDE_NON_DIVISIBLE, norm="rmsnorm", activation="swiglu", ffn_hidden_size=52, use_bias_in_attn_linear=False,
    use_bias_in_mlp=False,
)  # fmt: skip
GPT2 = dict(**NARROW, norm="layernorm", pos_emb="learned", no_weight_tying=False)
"""Everything replicated that there is: norms with biases, row biases, positions, and a tied output layer."""

ONE_RANK = {"plain": {}, "pipeline module": dict(pipe_parallel_size=1)}
TWO_RANKS = {
    "tp2": dict(model_parallel_size=2),
    "tp2 sequence parallel": dict(model_parallel_size=2, sequence_parallel=True),
    "tp2 pipeline module": dict(model_parallel_size=2, pipe_parallel_size=1),
    "tp2 zero1": dict(model_parallel_size=2, zero_optimization={"stage": 1}),
    "pp2": dict(pipe_parallel_size=2),
    "pp2 zero1": dict(pipe_parallel_size=2, zero_optimization={"stage": 1}),
    "dp2": dict(train_micro_batch_size_per_gpu=1),
    "dp2 pipeline module zero1": dict(pipe_parallel_size=1, zero_optimization={"stage": 1}),
    "dp2 zero1": dict(zero_optimization={"stage": 1}),
    "dp2 zero2": dict(zero_optimization={"stage": 2}),
    "dp2 zero3": dict(zero_optimization={"stage": 3}),
}
REPLICATED = ("tp2", "tp2 zero1", "pp2", "pp2 zero1", "dp2 zero3")
"""Where replicated or tied parameters could be counted twice or not at all."""


def write_data(folder):
    """Documents of tokens with something to learn: each token follows from the one before, but for noise."""
    from megatron.data.indexed_dataset import make_builder

    random = np.random.RandomState(3)
    builder = make_builder(str(Path(folder) / "text_document.bin"), "mmap", vocab_size=100)
    for _ in range(60):
        tokens = [int(random.randint(100))]
        for _ in range(random.randint(40, 90)):
            tokens.append((7 * tokens[-1] + 3) % 100 if random.rand() < 0.8 else int(random.randint(100)))
        builder.add_item(np.array(tokens))
        builder.end_document()
    builder.finalize(str(Path(folder) / "text_document.idx"))
    return str(Path(folder) / "text_document")


def values_for(data_path, log_dir, world_size, **settings):
    accumulation = dict(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=None, train_batch_size=4)
    return tiny_values(
        **{
            **accumulation, "train_iters": STEPS, "data_path": data_path, "data_impl": "mmap", "split": "80,10,10",
            "num_workers": 0, "log_interval": 1, "eval_interval": 4, "eval_iters": 2, "log_dir": log_dir,
            "gradient_clipping": 0.5, "weight_decay": 0.1, "lr_decay_style": "cosine", "warmup": 0.3, "min_lr": 1e-4,
            "optimizer": {"type": "Adam", "params": {"lr": 4e-3}}, "global_num_gpus": world_size, **settings,
        }
    )  # fmt: skip


def train_layouts(rank, world_size, folder, layouts, model):
    from megatron.logging import training_logger
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import pretrain

    training_logger.draw_loss_curve = lambda *_, **__: None  # a second each, and tested elsewhere
    for name, layout in layouts.items():
        values = values_for(f"{folder}/text_document", f"{folder}/{name}", world_size, **{**model, **layout})
        assert pretrain(NeoXArgs.from_dict(values)) == STEPS
    return True


def figures(folder, name):
    """Per step loss, gradient norm and rate, and the evaluations, from the run's own log."""
    records = [json.loads(line) for line in (Path(folder) / name / "train_log.jsonl").read_text().splitlines()]
    steps = np.array([[r["loss"], r["grad_norm"], r["lr"]] for r in records if "loss" in r])
    evaluations = np.array([r.get("valid_loss", r.get("test_loss")) for r in records if "loss" not in r])
    return steps, evaluations


@pytest.mark.parametrize("model, names", [(LLAMA, TWO_RANKS), (GPT2, REPLICATED)], ids=["llama", "gpt2"])
def test_layouts_train_alike(model, names, tmp_path):
    write_data(tmp_path)
    layouts = {name: TWO_RANKS[name] for name in names}
    run_distributed(1, train_layouts, str(tmp_path), ONE_RANK, model, tmp_path=tmp_path)
    run_distributed(2, train_layouts, str(tmp_path), layouts, model, tmp_path=tmp_path)
    wanted, evaluations = figures(tmp_path, "plain")
    assert wanted.shape == (STEPS, 3) and evaluations.shape == (3,)  # after step 4, at the end, and on the test data
    assert wanted[-1, 0] < wanted[0, 0] - 0.1  # it learns
    assert wanted[:, 1].min() > 0.5  # and the clipping is at work
    for name in [*ONE_RANK, *layouts]:
        steps, others = figures(tmp_path, name)
        assert np.abs(steps - wanted).max(axis=0) == pytest.approx([0, 0, 0], abs=TRAJECTORY), name
        assert np.abs(others - evaluations).max() <= TRAJECTORY, name
