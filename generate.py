"""Generate text with a trained model: `python deepy.py generate.py CONFIG [CONFIG ...]` (see text_gen_type)."""

from megatron.entry import run_main


def main(input_args=None, overwrite_values=None):
    """Load the checkpoint named by `load` and generate; returns the records, or None after an interactive session."""
    from megatron.neox_arguments import NeoXArgs

    neox_args = NeoXArgs.consume_inference_args(overwrite_values, input_args)

    from megatron.text_generation.modes import check_request, generate
    from megatron.text_generation.setup import load_runner, start_inference

    neox_args = start_inference(neox_args)
    check_request(neox_args)  # before a large model takes minutes to load
    return generate(neox_args, load_runner(neox_args))


if __name__ == "__main__":
    run_main(main, computes=True)
