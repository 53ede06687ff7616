"""The flash_attn package on a CPU: its Python is real, its kernels are either of two, see the fixtures.

Set up and run by `make test-flash-attn`, because it needs a numpy and a Triton that the other tests do not use.
"""

import pytest

from megatron.model.attention.core import flash_package
from tests.flash_attn.cuda_library import CudaLibrary


@pytest.fixture
def package():
    """flash_attn.flash_attn_interface, with its operators registered for the CPU, too."""
    from flash_attn import flash_attn_interface

    for operator in (flash_attn_interface._flash_attn_forward, flash_attn_interface._flash_attn_backward):
        operator.register_kernel("cpu")(operator._init_fn)
    return flash_attn_interface


@pytest.fixture
def triton_kernels(package, monkeypatch):
    """attention_config=flash computes with the package's Triton kernels, although these do not count as usable."""
    monkeypatch.setattr(flash_package, "is_usable", lambda device, dtype: True)
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return package.flash_attn_func(*args, **kwargs)

    monkeypatch.setattr(flash_package, "_flash_attn_func", lambda: counted)
    yield
    assert calls, "another kernel did the work"


@pytest.fixture
def cuda_library(package, monkeypatch):
    """The package believes that it has its CUDA library: a stand-in that follows the package's documentation.

    is_usable still says no for the CPU, where the tensors are: ask it about "cuda". Returns the stand-in.
    """
    library = CudaLibrary()
    monkeypatch.setattr(package, "flash_attn_gpu", library)
    monkeypatch.setattr(package, "USE_TRITON_ROCM", False)
    flash_package._flash_attn_func.cache_clear()
    yield library
    flash_package._flash_attn_func.cache_clear()
