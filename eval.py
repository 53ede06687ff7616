"""Evaluate a trained model: `python deepy.py eval.py CONFIG [CONFIG ...] --eval_tasks TASK... | --perplexity FILE`."""

from megatron.entry import run_main


def main(input_args=None, overwrite_values=None):
    """Load the checkpoint named by `load` and measure; returns the results on rank 0, None on the others."""
    from megatron.neox_arguments import NeoXArgs

    neox_args = NeoXArgs.consume_inference_args(overwrite_values, input_args)

    from megatron.evaluation.run import Evaluation
    from megatron.text_generation.setup import load_runner, start_inference

    neox_args = start_inference(neox_args)
    evaluation = Evaluation(neox_args)  # checked before a large model takes minutes to load
    return evaluation.run(load_runner(neox_args))


if __name__ == "__main__":
    run_main(main, computes=True)
