"""Generate text with a trained model: `python deepy.py generate.py CONFIG [CONFIG ...]` (see text_gen_type)."""

from megatron.entry import run_main


def main(input_args=None, overwrite_values=None):
    """Load the checkpoint named by `load` and generate; returns the records, or None after an interactive session."""
    from megatron.neox_arguments import NeoXArgs
    from megatron.text_generation.modes import generate
    from megatron.text_generation.setup import setup_for_inference

    neox_args = NeoXArgs.consume_inference_args(overwrite_values, input_args)
    neox_args, runner = setup_for_inference(neox_args)
    return generate(neox_args, runner)


if __name__ == "__main__":
    run_main(main)
