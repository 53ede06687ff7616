"""Shared set-up: one thread per process, no accelerator probing, a printed reason for each skipped gpu test."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu" if os.environ.get("NEOX_TEST_DEVICE") != "cuda" else "cuda")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here"))
