"""TensorBoard, if `tensorboard_dir` is set. The only file that imports it."""

import math
from typing import Dict

from megatron.errors import ConfigError


class TensorBoardSink:
    """Writes scalars to `tensorboard_dir`. Raises ConfigError where the package is missing."""

    def __init__(self, folder: str):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                f"tensorboard_dir={folder} needs TensorBoard: pip install -r requirements/requirements-tensorboard.txt"
            ) from None
        self._writer = SummaryWriter(log_dir=folder)

    def write(self, scalars: Dict[str, float], iteration: int) -> None:
        """Add one point to each named curve; what is not finite is left out."""
        for name, value in scalars.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, iteration)

    def picture(self, name: str, path: str, iteration: int) -> None:
        """Add a PNG file."""
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path), iteration, dataformats="HWC")

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
