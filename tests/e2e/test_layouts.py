"""`deepy.py train.py model.yml LAYOUT.yml` on two processes reaches the loss of one process."""

import pytest

from tests.e2e.programs import deepy, losses_of, write_config
from tests.helpers.tolerances import TRAJECTORY

LAYOUTS = {
    "tp2": dict(model_parallel_size=2),
    "pp2": dict(pipe_parallel_size=2, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4),
    "dp2-zero1": dict(num_gpus=2, zero_optimization={"stage": 1}),
    "dp2-zero2": dict(num_gpus=2, zero_optimization={"stage": 2}),
}


@pytest.fixture(scope="module")
def one_process(workplace):
    write_config(workplace, "one.yml", log_dir="runs/one")
    deepy(workplace, "train.py", "model.yml", "one.yml")
    return losses_of(workplace / "runs/one")


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_train_as_one(workplace, one_process, name):
    write_config(workplace, f"{name}.yml", log_dir=f"runs/{name}", **LAYOUTS[name])
    deepy(workplace, "train.py", "model.yml", f"{name}.yml")
    losses = losses_of(workplace / f"runs/{name}")
    assert losses.keys() == one_process.keys()
    largest = max(abs(losses[step] - one_process[step]) for step in losses)
    assert largest <= TRAJECTORY, f"{name}: the losses differ by up to {largest:.2g}"
