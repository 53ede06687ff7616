"""Imported once by the fork server of tests.helpers.distributed."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402, F401
import torch  # noqa: E402

torch.set_num_threads(1)
