"""What a run shows and keeps: console, JSON lines, TensorBoard, Weights & Biases, the loss curve."""

from megatron.logging.quiet import quiet_libraries
from megatron.logging.records import RunLog, read_records, run_folder
from megatron.logging.tee import tee_output
from megatron.logging.training_logger import TrainingLogger

__all__ = ["RunLog", "TrainingLogger", "quiet_libraries", "read_records", "run_folder", "tee_output"]
