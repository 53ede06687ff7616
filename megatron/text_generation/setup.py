"""From a config to a model with its weights, without a training engine."""

from megatron.checkpointing import load_model_weights
from megatron.initialize import initialize_megatron
from megatron.logging.quiet import quiet_libraries, without_library_prints
from megatron.model.gpt2_model import build_model
from megatron.mpu import current_device
from megatron.text_generation.runner import InferenceRunner


def start_inference(neox_args):
    """Start the process groups and build the tokenizer; returns the args to go on with.

    They differ in sequence_parallel, which is off: single tokens cannot be split over ranks, and the function
    computed is the same. Raises ConfigError or DataError (tokenizer).
    """
    neox_args = neox_args.update(sequence_parallel=False)
    quiet_libraries(neox_args)
    neox_args.configure_distributed_args()
    neox_args.build_tokenizer()
    initialize_megatron(neox_args)
    return neox_args


def load_runner(neox_args) -> InferenceRunner:
    """Build the model and fill it from `neox_args.load` (`iteration`, or the newest). Raises CheckpointError."""
    with without_library_prints(neox_args):
        model = build_model(neox_args).to(current_device())
    neox_args.iteration = load_model_weights(neox_args, model, neox_args.iteration)
    return InferenceRunner(neox_args, model)
