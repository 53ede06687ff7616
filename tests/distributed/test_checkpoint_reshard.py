"""Models at TP 2 and 4 loaded from a TP 1 checkpoint, and back: the same logits."""

import os

import numpy as np
import pytest
import torch

from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4
from tests.helpers.resharding import (
    DEPENDS_ON_RANKS,
    SPLIT_AS_OTHERS,
    VARIANTS,
    random_layers,
    settings_of,
    write_checkpoint,
)
from tests.helpers.tolerances import FORWARD, LOSS

COMPARED = [variant for variant in VARIANTS if variant not in DEPENDS_ON_RANKS + SPLIT_AS_OTHERS]
TOLERANCE = FORWARD[torch.float32]


def _tokens():
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(16).expand(2, -1).contiguous()


def _logits(rank, world_size, root, variants, sizes, suffix=""):
    """{variant: logits [2, 16, 128] of the model loaded at this number of ranks}; its padding is GPT-NeoX's."""
    from megatron import mpu
    from megatron.checkpointing import load_model_weights
    from megatron.initialize import initialize_megatron
    from megatron.model.gpt2_model import build_model

    found = {}
    for variant in variants:
        tp, pp = sizes
        layout = dict(model_parallel_size=tp, pipe_parallel_size=pp, padded_vocab_size=128 * tp, global_num_gpus=tp)
        args = NeoXArgs.from_dict(settings_of(variant, load=os.path.join(root, variant + suffix), **layout))
        initialize_megatron(args)
        model = build_model(args)
        assert load_model_weights(args, model) == 5
        with torch.no_grad():
            logits = mpu.gather_from_model_parallel_region(model(_tokens()))
        assert logits.shape[-1] == 128 * tp
        found[variant] = logits[..., :128].numpy()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """TP 1 checkpoints of all variants, and their logits."""
    root = tmp_path_factory.mktemp("saved")
    for variant in COMPARED:
        settings = settings_of(variant)
        write_checkpoint(root / variant, random_layers(NeoXArgs.from_dict(settings)), settings)
    (logits,) = run_distributed(1, _logits, str(root), COMPARED, (1, 0), tmp_path=root)
    assert all(np.abs(values).max() > 0.3 for values in logits.values())
    return str(root), logits


@pytest.mark.parametrize("sizes", [(2, 0), (4, 0), (2, 1)])
def test_logits_at_any_tensor_parallel_size(saved, sizes, tmp_path):
    root, expected = saved
    for found in run_distributed(sizes[0], _logits, root, COMPARED, sizes, tmp_path=tmp_path):
        for variant in COMPARED:
            difference = np.abs(found[variant] - expected[variant]).max()
            assert difference <= TOLERANCE, f"{variant}: {difference}"


def test_logits_of_what_the_tool_wrote(saved, tmp_path):
    from tools.ckpts import reshard

    root, expected = saved
    for variant in COMPARED:
        source, four = os.path.join(root, variant), os.path.join(str(tmp_path), variant + " four")
        assert reshard.main([source, four, "--model-parallel-size=4", "--pipe-parallel-size=0"]) == 0
    for tp, pp in ((4, 0), (2, 0)):
        for found in run_distributed(tp, _logits, str(tmp_path), COMPARED, (tp, pp), " four", tmp_path=tmp_path):
            for variant in COMPARED:
                assert np.abs(found[variant] - expected[variant]).max() <= TOLERANCE, (variant, tp)


TRAINED = dict(**GQA_TP4, activation="swiglu", ffn_hidden_size=44, gpt_j_residual=True, seq_length=16)
TRAINED.update(max_position_embeddings=16, checkpoint_factor=10)
FAST = {"type": "adam", "params": {"lr": 3e-2}}


def _layout(tp, pp, **more):
    return tiny_args(**TRAINED, model_parallel_size=tp, pipe_parallel_size=pp, padded_vocab_size=512, **more)


def _train_and_save(rank, world_size, folder, tp, pp):
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine, train

    args = _layout(tp, pp, global_num_gpus=world_size, save=folder, optimizer=FAST)
    engine = build_engine(args)
    train(args, engine, 3)
    save_checkpoint(args, 3, engine)
    return train(args, engine, 1, first=100)


def _continue(rank, world_size, folder, tp, pp, runs):
    """Of each run's settings: the error, or the iteration and the loss of the next step."""
    from megatron.errors import CheckpointError
    from tests.helpers.engines import build_engine, train

    found = []
    for settings in runs:
        args = _layout(tp, pp, global_num_gpus=world_size, load=folder, optimizer=FAST, seed=99, **settings)
        try:
            engine = build_engine(args)
            found.append((args.iteration, train(args, engine, 1, first=100)[0]))
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_training_goes_on_from_another_size(tmp_path):
    """TP 2 x PP 2, with biases of gpt_j_residual trained on both ranks, to TP 1 and TP 4; not with optimizer state."""
    folder = str(tmp_path / "run")
    loss = run_distributed(4, _train_and_save, folder, 2, 2, tmp_path=tmp_path)[0][0]
    runs = [dict(finetune=True), {}]
    ((tuned, message),) = run_distributed(1, _continue, folder, 1, 0, runs, tmp_path=tmp_path)
    runs = [dict(no_load_optim=True, zero_optimization={"stage": 1})]
    continued = [found for (found,) in run_distributed(4, _continue, folder, 4, 1, runs, tmp_path=tmp_path)]
    assert [tuned[0]] + [iteration for iteration, _ in continued] == [0, 3, 3, 3, 3]
    for _, value in [tuned, *continued]:
        assert abs(value - loss) <= LOSS
    assert "model_parallel_size: 2 in the checkpoint, 1 in the config" in message
    assert "no_load_optim=true" in message and "tools/ckpts/reshard.py" in message


def _deepspeed_loads(rank, world_size, folder, pp):
    """As GPT-NeoX loads weights: by DeepSpeed's own code, unrestricted, strict, module only."""
    from megatron.checkpointing.reader import CheckpointReader
    from megatron.checkpointing.weights import layers_of
    from tests.helpers.engines import build_engine

    settings = settings_of("gqa gated rms", padded_vocab_size=256, model_parallel_size=2, pipe_parallel_size=pp)
    engine = build_engine(NeoXArgs.from_dict({**settings, "global_num_gpus": 2, "optimizer": FAST}))
    path, state = engine.load_checkpoint(
        folder,
        load_optimizer_states=False,
        load_lr_scheduler_states=False,
        load_module_only=True,
        load_module_strict=True,
    )
    reader = CheckpointReader(path if os.path.isdir(path) else os.path.dirname(path))
    loaded = layers_of(engine.module)
    assert sorted(loaded) == reader.layer_indices()
    for index, tensors in loaded.items():
        saved = reader.layer_state(index, rank)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())
    return state["iteration"], state["args"]["padded_vocab_size"], state["args"]["model_parallel_size"]


@pytest.mark.parametrize("pp", [0, 1])
def test_deepspeed_itself_loads_what_the_tool_wrote(saved, pp, tmp_path):
    from tools.ckpts import reshard

    source, out = os.path.join(saved[0], "gqa gated rms"), str(tmp_path / "out")
    assert reshard.main([source, out, "--model-parallel-size=2", f"--pipe-parallel-size={pp}"]) == 0
    assert run_distributed(2, _deepspeed_loads, out, pp, tmp_path=tmp_path) == [(5, 256, 2)] * 2
