"""From a config to a model with its weights, without a training engine."""

from typing import Any, Tuple

from megatron.checkpointing import load_model_weights
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model
from megatron.mpu import current_device
from megatron.text_generation.runner import InferenceRunner


def setup_for_inference(neox_args) -> Tuple[Any, InferenceRunner]:
    """Start the process groups, build the tokenizer and the model, load `neox_args.load` -> (args, runner).

    The returned args differ in sequence_parallel, which is off: single tokens cannot be split over ranks, and the
    function computed is the same. Raises ConfigError, DataError (tokenizer) or CheckpointError.
    """
    neox_args = neox_args.update(sequence_parallel=False)
    neox_args.configure_distributed_args()
    neox_args.build_tokenizer()
    initialize_megatron(neox_args)
    model = build_model(neox_args).to(current_device())
    neox_args.iteration = load_model_weights(neox_args, model, neox_args.iteration)
    return neox_args, InferenceRunner(neox_args, model)
