"""Accelerators: memory and the peak of dense bf16 matrix products, from their vendors' data sheets."""

from dataclasses import dataclass
from typing import Dict, Optional


@dataclass(frozen=True)
class Device:
    """memory in 10**9 bytes, bf16 in 10**12 operations a second, dense (not the figure with sparsity)."""

    name: str
    memory: float
    bf16_tflops: Optional[float]
    source: str


_ALL = (
    Device("A100-40", 40, 312, "NVIDIA A100 data sheet, 2021"),
    Device("A100-80", 80, 312, "NVIDIA A100 data sheet, 2021"),
    Device("H100", 80, 989.5, "NVIDIA H100 data sheet, 2022: SXM5, 1979 with sparsity"),
    Device("H100-PCIe", 80, 756.5, "NVIDIA H100 data sheet, 2022: PCIe, 1513 with sparsity"),
    Device("H200", 141, 989.5, "NVIDIA H200 data sheet, 2023: SXM, 1979 with sparsity"),
    Device("B200", 180, 2250, "NVIDIA HGX B200 data sheet, 2024: 4500 with sparsity"),
    Device("L40S", 48, 362, "NVIDIA L40S data sheet, 2023: 733 with sparsity"),
    Device("RTX-4090", 24, 165.2, "NVIDIA Ada architecture white paper, 2022: bf16 with fp32 sums"),
    Device("MI250X", 128, 383, "AMD Instinct MI250X data sheet, 2021: both dies"),
    Device("MI300X", 192, 1307.4, "AMD Instinct MI300X data sheet, 2023"),
)
DEVICES: Dict[str, Device] = {device.name.lower(): device for device in _ALL}
