"""Whether this process can run the package on a CPU."""

import importlib.util
import os

import pytest

SWITCHES = {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE", "TRITON_INTERPRET": "1"}
"""The package takes its Triton kernels, written for AMD's GPUs, and Triton runs them on the CPU."""


def skip_module_without_package():
    """Call at the top of a test module."""
    switched = all(os.environ.get(name) == value for name, value in SWITCHES.items())
    if not switched or importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn on Triton's interpreter: `make test-flash-attn`", allow_module_level=True)
