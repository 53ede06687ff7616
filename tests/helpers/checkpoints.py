"""A stand-in config and engine, for tests of checkpointing that need no model."""

from types import SimpleNamespace

import torch

from megatron.geometry import HeadGeometry
from tests.helpers.geometries import QUOTIENT


def plain_args(save=None, load=None, geometry=None, **settings):
    """What checkpointing asks of NeoXArgs, and nothing else."""
    numbers = HeadGeometry.from_config(**(geometry or QUOTIENT))
    args = SimpleNamespace(
        save=None if save is None else str(save),
        load=None if load is None else str(load),
        config_files={"tiny.yml": "hidden-size: 64\n"},
        keep_last_n_checkpoints=None,
        no_save_optim=False,
        no_save_rng=False,
        no_load_optim=False,
        no_load_rng=False,
        finetune=False,
        s3_path=None,
        num_layers=2,
        hidden_size=numbers.hidden_size,
        num_attention_heads=numbers.num_attention_heads,
        max_position_embeddings=32,
        make_vocab_size_divisible_by=128,
        padded_vocab_size=128,
        tokenizer_type="CharLevelTokenizer",
        model_parallel_size=1,
        pipe_parallel_size=0,
        pos_emb="none",
        rotary_denominator_scale=None,
        lora=None,
        head_geometry=lambda layer_number=0: numbers,
        attention_scale=lambda layer_number=0, group=0: numbers.default_softmax_scale,
    )
    for key, value in settings.items():
        setattr(args, key, value)
    return args


class TinySequential(torch.nn.Module):
    """Two layers named as GPT2ModelSequential names its own."""

    def __init__(self, width=6):
        super().__init__()
        self.sequential = torch.nn.ModuleList([torch.nn.Linear(width, width), torch.nn.Linear(width, 1)])

    def forward(self, inputs):
        return self.sequential[1](torch.tanh(self.sequential[0](inputs))).square().mean()


def tiny_engine(seed=0, width=6, zero_stage=0):
    """A DeepSpeed engine over TinySequential; needs an initialised process group."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first
    torch.manual_seed(seed)
    model = TinySequential(width)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def tiny_steps(engine, steps, first=0, width=6):
    """Train; the batch depends only on the step's number. Returns the losses."""
    losses = []
    for step in range(first, first + steps):
        inputs = torch.randn(2, width, generator=torch.Generator().manual_seed(step))
        loss = engine(inputs)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
