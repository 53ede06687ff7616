"""Names of precisions, here, on the command line and in config.json, and the conversion of one tensor."""

from typing import Dict, Iterable, List, Optional, Tuple

import torch

from megatron.errors import ConversionError

OPTIONS: Dict[str, Optional[torch.dtype]] = {
    "auto": None,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
"""--precision, as GPT-NeoX's converter has it; auto: each tensor stays as it is."""

PRECISION = {torch.float16: "fp16", torch.bfloat16: "bfloat16", torch.float32: "fp32"}
"""The setting of that name."""

DTYPE_NAME = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""dtype in config.json."""


def dtype_of(precision: str) -> Optional[torch.dtype]:
    """The dtype of an option. Raises ConversionError for an unknown one."""
    if precision not in OPTIONS:
        raise ConversionError(f"precision={precision} is not known; choose one of {', '.join(OPTIONS)}")
    return OPTIONS[precision]


def main_dtype(sizes: Iterable[Tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype of most of the (dtype, elements) given."""
    counted: Dict[torch.dtype, int] = {}
    for dtype, elements in sizes:
        counted[dtype] = counted.get(dtype, 0) + elements
    return max(counted, key=lambda dtype: counted[dtype])


def dtype_problems(dtypes: Iterable[Tuple[str, torch.dtype]], wanted: Optional[torch.dtype]) -> List[str]:
    """Weights (name, dtype) that are no numbers of a known precision, as lines."""
    known = (*PRECISION, torch.float64) if wanted else tuple(PRECISION)
    advice = "; a quantized model has to be dequantized first"
    return [
        f"{name}: dtype {str(dtype).removeprefix('torch.')}"
        + ("; choose a precision other than auto" if dtype is torch.float64 else advice)
        for name, dtype in dtypes
        if dtype not in known
    ]


def converted(tensor: torch.Tensor, dtype: Optional[torch.dtype], name: str) -> torch.Tensor:
    """The tensor in another dtype, None: as it is. Raises ConversionError if numbers become infinite."""
    if dtype is None or tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if dtype is torch.float16 and not torch.equal(result.isfinite(), tensor.isfinite()):
        most = tensor.abs().max().item()
        raise ConversionError(f"{name}: fp16 holds no numbers above 65504, and there are some up to {most:g}; use bf16")
    return result
