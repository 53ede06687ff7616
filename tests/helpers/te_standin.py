"""Runs the real Python sources of Transformer Engine 1.12 on a machine without a GPU.

Only what NVIDIA ships compiled (libtransformer_engine.so, transformer_engine_torch.*.so) is replaced, by
tests.helpers.te_kernels. All of transformer_engine/pytorch is the unmodified code of the wheel
transformer_engine-1.12.0-py3-none-any.whl. What this cannot show: NVIDIA's kernels, cuDNN's attention, FP8.
"""

import contextlib
import enum
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import types

import torch

from tests.helpers.te_kernels import KERNELS, OPERATORS

EXTENSION = "transformer_engine_torch"

SWITCHES = {
    "NVTE_PROJECT_BUILDING": "1",  # TE's own switch: load none of cuDNN, NVRTC, libtransformer_engine
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_FLASH_ATTN": "0",
    "NVTE_FUSED_ATTN": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # else TE warns about the overlap of communication, of which there is none
}
"""Environment variables that are set unless they are set already."""


def _enum(name, names):
    return enum.IntEnum(name, {value: i for i, value in enumerate(names.split())})


ENUMS = dict(
    DType=_enum("DType", "kByte kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2"),
    FP8FwdTensors=_enum(
        "FP8FwdTensors",
        "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT "
        "GEMM3_OUTPUT",
    ),
    FP8BwdTensors=_enum("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"),
    NVTE_Bias_Type=_enum("NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI"),
    NVTE_Mask_Type=_enum(
        "NVTE_Mask_Type",
        "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
        "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ),
    NVTE_QKV_Layout=_enum(
        "NVTE_QKV_Layout",
        "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D "
        "NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D "
        "NVTE_THD_THD_THD",
    ),
    NVTE_Fused_Attn_Backend=enum.IntEnum(
        "NVTE_Fused_Attn_Backend",
        dict(NVTE_No_Backend=-1, NVTE_F16_max512_seqlen=0, NVTE_F16_arbitrary_seqlen=1, NVTE_FP8=2),
    ),
    UbufOverlapAlgo=_enum(
        "UbufOverlapAlgo",
        "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P "
        "ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P",
    ),
)

CLASSES = ("FP8TensorMeta", "UbufBootstrapCallbacks", "UbufCommOverlap", "UbufP2PCommOverlap")


def install(capability=(8, 0)):
    """Import transformer_engine, which must be on sys.path, over the stand-in kernels. Once per process.

    capability: the CUDA compute capability that TE is told; 8.0 has no FP8.
    """
    if EXTENSION in sys.modules:
        return
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
    extension = _extension()
    _restore_onnx_names()
    with _as_compiled_library(extension), _no_pip_queries():
        import transformer_engine.pytorch  # noqa: F401
    _emulate_device(capability)


def _extension():
    """The module transformer_engine_torch. A kernel without a stand-in raises when it is called."""
    module = types.ModuleType(EXTENSION)
    for name, value in {**ENUMS, **KERNELS, **{name: type(name, (), {}) for name in CLASSES}}.items():
        setattr(module, name, value)
    module.get_fused_attn_backend = lambda *args: ENUMS["NVTE_Fused_Attn_Backend"].NVTE_No_Backend
    module.get_cudnn_version = lambda: 90100
    module.get_cublasLt_version = lambda: 120000
    module._num_cublas_streams = 4
    module.ubuf_built_with_mpi = lambda: False
    module.device_supports_multicast = lambda *args: False
    module.__getattr__ = _missing
    library = torch.library.Library("tex_ts", "DEF")
    for schema, function in OPERATORS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    module._library = library  # its operators live as long as it does
    return module


def _missing(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"no stand-in for transformer_engine_torch.{name}")

    return kernel


def _restore_onnx_names():
    """torch 2.13 keeps the ONNX helpers that TE 1.12 imports in another package."""
    parents = {"_type_utils": "torch.onnx", "jit_utils": "torch.onnx._internal"}
    for name, parent in parents.items():
        try:
            importlib.import_module(f"{parent}.{name}")
        except ImportError:
            module = importlib.import_module(f"torch.onnx._internal.torchscript_exporter.{name}")
            sys.modules[f"{parent}.{name}"] = module
            setattr(importlib.import_module(parent), name, module)


@contextlib.contextmanager
def _as_compiled_library(extension):
    """TE looks for transformer_engine_torch.*.so and loads it by path: it finds an empty file and gets `extension`."""
    spec_from_file_location, glob = importlib.util.spec_from_file_location, pathlib.Path.glob
    with tempfile.TemporaryDirectory(prefix="te_standin") as folder:
        library = pathlib.Path(folder) / "transformer_engine" / f"{EXTENSION}.standin.so"
        library.parent.mkdir()
        library.touch()

        def spec(name, *args, **kwargs):
            if name == EXTENSION:
                return importlib.util.spec_from_loader(name, _Loader(extension))
            return spec_from_file_location(name, *args, **kwargs)

        def find(path, pattern, *args, **kwargs):
            return iter([library]) if pattern.startswith(f"{EXTENSION}.") else glob(path, pattern, *args, **kwargs)

        importlib.util.spec_from_file_location, pathlib.Path.glob = spec, find
        try:
            yield
        finally:
            importlib.util.spec_from_file_location, pathlib.Path.glob = spec_from_file_location, glob


class _Loader:
    def __init__(self, module):
        self.module = module

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def _no_pip_queries():
    """TE asks `pip show` for its compiled packages, half a second each; the answer is that they are not installed."""
    run = subprocess.run

    def answer(command, *args, **kwargs):
        if list(command[1:4]) == ["-m", "pip", "show"]:
            return subprocess.CompletedProcess(command, returncode=1)
        return run(command, *args, **kwargs)

    subprocess.run = answer
    try:
        yield
    finally:
        subprocess.run = run


# TE's modules get, under the name `torch`, a proxy in which "cuda" means the CPU. torch itself is left alone, but for
# Tensor.is_cuda, which answers True to TE's own files only. (A TorchFunctionMode would be off during backward.)


class _Proxy(types.ModuleType):
    def __init__(self, real, **replaced):
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name):
        return getattr(self._real, name)


def _emulate_device(capability):
    proxy = _torch_proxy(capability)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.pytorch") and getattr(module, "torch", None) is torch:
            module.torch = proxy
    is_cuda = torch.Tensor.is_cuda
    torch.Tensor.is_cuda = property(lambda tensor: _called_from_te() or is_cuda.__get__(tensor))


def _called_from_te():
    return f"{os.sep}transformer_engine{os.sep}pytorch{os.sep}" in sys._getframe(2).f_code.co_filename


def _torch_proxy(capability):
    cuda = _Proxy(
        torch.cuda,
        is_available=lambda: True,
        current_device=lambda: torch.device("cpu"),  # TE passes it on as device=
        get_device_properties=lambda *args: types.SimpleNamespace(major=capability[0], minor=capability[1]),
        get_device_capability=lambda *args: capability,
        is_current_stream_capturing=lambda: False,
        nvtx=types.SimpleNamespace(range=lambda *args, **kwargs: contextlib.nullcontext()),
    )
    factories = "empty zeros ones full arange tensor rand randn empty_like zeros_like ones_like full_like".split()
    return _Proxy(torch, cuda=cuda, **{name: _on_the_cpu(getattr(torch, name)) for name in factories})


def _on_the_cpu(factory):
    def make(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make
