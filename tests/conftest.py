"""Shared set-up: one thread per process, no accelerator probing, a printed reason for each skipped gpu test."""

import os
import sys

DEVICE = os.environ.get("NEOX_TEST_DEVICE", "cpu")
os.environ.setdefault("DS_ACCELERATOR", DEVICE)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def process_of_its_own():
    """A program run inside a test says in the environment which rank it is; the next test is none."""
    before = {name: os.environ.get(name) for name in PROCESS}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True, scope="module")
def random_states_of_its_own():
    """A program run inside a test seeds DeepSpeed's random states of ranks, from which dropout draws once they are
    there; the next file starts without."""
    yield
    checkpointing = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    if checkpointing is not None:
        checkpointing.get_cuda_rng_tracker().reset()


def pytest_collection_modifyitems(items):
    reason = _why_not_on_gpu()
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not_on_gpu():
    if not torch.cuda.is_available():
        return "needs a CUDA device; torch.cuda.is_available() is False here"
    if DEVICE != "cuda":
        return "run with NEOX_TEST_DEVICE=cuda .venv/bin/python -m pytest -m gpu tests/gpu"
    return None
