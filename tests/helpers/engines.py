"""The training engine over the real model, for tests that train a few steps without a data set."""

import torch


def build_engine(neox_args):
    """Process groups, seeds, model, optimizer, schedule; resumes from neox_args.load if that is set."""
    from megatron.initialize import initialize_megatron
    from megatron.training import setup_model_and_optimizer

    initialize_megatron(neox_args)
    return setup_model_and_optimizer(neox_args)


def train(neox_args, engine, steps, first=0):
    """Optimizer steps on batches that depend on step, micro batch and data-parallel rank only; returns the losses."""
    from megatron.training import train_step

    engine.train()
    return [train_step(neox_args, engine, _batches(neox_args, step))["loss"] for step in range(first, first + steps)]


def _batches(neox_args, step):
    from megatron import mpu

    size = (neox_args.train_micro_batch_size_per_gpu, neox_args.seq_length + 1)
    for number in range(neox_args.gradient_accumulation_steps):
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + mpu.get_data_parallel_rank())
        yield {"text": torch.randint(0, neox_args.padded_vocab_size, size, generator=generator)}
