"""When the package counts as usable. These tests need no package."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.model.attention.core import flash_package

HALF = (torch.float16, torch.bfloat16)


@pytest.fixture
def install(monkeypatch):
    """install(interface) makes `from flash_attn import flash_attn_interface` give it; None stands for no package."""

    def put(interface):
        package = None if interface is None else ModuleType("flash_attn")
        if package is not None:
            package.flash_attn_interface = interface
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        flash_package._flash_attn_func.cache_clear()

    yield put
    flash_package._flash_attn_func.cache_clear()


def _with_softcap(q, k, v, softcap=0.0):
    return q


def _without_softcap(q, k, v):
    return q


@pytest.mark.parametrize(
    "interface, usable",
    (
        (None, False),
        (SimpleNamespace(flash_attn_func=_with_softcap), True),
        (SimpleNamespace(flash_attn_func=_with_softcap, USE_TRITON_ROCM=False), True),
        (SimpleNamespace(flash_attn_func=_with_softcap, USE_TRITON_ROCM=True), False),
        (SimpleNamespace(flash_attn_func=_without_softcap), False),
    ),
    ids=("no package", "CUDA", "CUDA in a new release", "Triton for AMD", "before 2.6"),
)
def test_which_package_is_usable(interface, usable, install):
    install(interface)
    assert [flash_package.is_usable("cuda:1", dtype) for dtype in HALF] == [usable] * 2
    assert not flash_package.is_usable("cuda", torch.float32)
    assert not any(flash_package.is_usable("cpu", dtype) for dtype in HALF)


def test_the_package_is_imported_only_where_it_is_asked_for():
    program = """
import sys, torch
from megatron.geometry import HeadGeometry
from megatron.model.attention.core import AttentionRequest, select_kernel
geometry = HeadGeometry.from_config(hidden_size=80, num_attention_heads=6, num_kv_heads=2, head_dim=24)
for kind in ("global", "flash", "chunked", "auto"):
    select_kernel(kind, AttentionRequest(geometry, torch.bfloat16, torch.device("cpu")))
select_kernel("flash", AttentionRequest(geometry, torch.float32, torch.device("cpu")))
print(sorted(name for name in sys.modules if name.startswith("flash_attn")))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"
