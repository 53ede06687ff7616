"""Imported checkpoints, loaded by the YAML beside them at their own layout, compute what transformers computes."""

import os

import numpy as np
import torch
import transformers

from tests.helpers.convert_folders import GQA, assert_same_tensors, run_export, run_import
from tests.helpers.convert_models import VOCAB, hf_config, hf_model, save_hf, text, their_logits
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import FORWARD

MODELS = {
    "mistral": dict(GQA),
    "qwen3": dict(GQA, tie_word_embeddings=True, attention_bias=True),
    "gpt_neox": dict(hidden_size=96, intermediate_size=40, num_attention_heads=4, num_key_value_heads=None),
    "shared kv": dict(GQA, num_attention_heads=4, num_key_value_heads=2, head_dim=24),
}
"""shared kv: at 4 ranks two of them share a key/value head."""
LAYOUTS = {4: [(4, 0), (2, 2), (4, 1)]}


def _kind(name):
    return "mistral" if name == "shared kv" else name


def _logits(rank, world_size, root, layouts):
    """{(model, tp, pp): the padded vocabulary's logits} as numpy, where this rank has them."""
    from megatron import mpu
    from megatron.checkpointing import load_model_weights
    from megatron.initialize import initialize_megatron
    from megatron.model.gpt2_model import build_model
    from megatron.neox_arguments import NeoXArgs

    found = {}
    for name in MODELS:
        for tp, pp in layouts:
            args = NeoXArgs.from_ymls(
                [os.path.join(root, f"{name} {tp} {pp}", "model.yml")],
                dict(distributed_backend="gloo", use_cpu_initialization=True, global_num_gpus=world_size),
            )
            mpu.destroy_model_parallel()
            initialize_megatron(args)
            model = build_model(args, mpu.get_topology())
            model.set_parallel_output(False)
            load_model_weights(args, model)
            found[name, tp, pp] = _forward(model, text())
    return found


def _forward(model, tokens):
    from megatron import mpu

    model.eval()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    with torch.no_grad():
        if mpu.get_pipe_parallel_world_size() == 1:
            return model((tokens, positions))[..., :VOCAB].numpy()
        value = (tokens, positions)
        stage, stages = mpu.get_pipe_parallel_rank(), mpu.get_pipe_parallel_world_size()
        group, rank = mpu.get_pipe_parallel_group(), torch.distributed.get_rank()
        peers = torch.distributed.get_process_group_ranks(group)
        if stage > 0:
            shape = torch.zeros(3, dtype=torch.int64)
            torch.distributed.recv(shape, peers[stage - 1])
            value = torch.empty(*shape.tolist())
            torch.distributed.recv(value, peers[stage - 1])
        for _, layer in model.local_layers():
            value = layer(value)
        if stage < stages - 1:
            torch.distributed.send(torch.tensor(value.shape), peers[stage + 1])
            torch.distributed.send(value.contiguous(), peers[stage + 1])
            return None
        assert rank == peers[-1]
        return value[..., :VOCAB].numpy()


def test_logits_at_every_layout_are_transformers(tmp_path):
    expected = {}
    for name, changes in MODELS.items():
        hf = hf_model(hf_config(_kind(name), **changes))
        source = save_hf(hf, tmp_path / name)
        expected[name] = their_logits(hf, text()).numpy()
        for tp, pp in LAYOUTS[4]:
            out = tmp_path / f"{name} {tp} {pp}"
            run_import(source, out, model_parallel_size=tp, pipe_parallel_size=pp)
            run_export(out, tmp_path / "back" / out.name)
            assert_same_tensors(source, tmp_path / "back" / out.name)
    ranks = run_distributed(4, _logits, str(tmp_path), LAYOUTS[4], tmp_path=tmp_path)
    compared = 0
    for found in ranks:
        for (name, *layout), logits in found.items():
            if logits is not None:
                assert np.abs(logits - expected[name]).max() <= FORWARD[torch.float32], (name, layout)
                assert np.abs(logits).max() > 1
                compared += 1
    assert compared == len(MODELS) * (4 + 2 + 4)


def _train(rank, world_size, root, settings):
    """Two steps from the import, then a save; the logits after them."""
    from megatron.checkpointing import save_checkpoint
    from megatron.neox_arguments import NeoXArgs
    from tests.helpers.engines import build_engine, train

    run = dict(distributed_backend="gloo", use_cpu_initialization=True, global_num_gpus=world_size, train_iters=10)
    run.update(optimizer={"type": "adam", "params": {"lr": 1e-2}}, save=os.path.join(root, "trained"))
    run.update(checkpoint_factor=10, lr_decay_style="constant", min_lr=0.0, **settings)
    args = NeoXArgs.from_ymls([os.path.join(root, "ours", "model.yml")], run)
    engine = build_engine(args)
    train(args, engine, 2)
    save_checkpoint(args, 2, engine)
    return _forward(engine.module, text())


def test_import_train_export(tmp_path):
    """ZeRO stage 3 keeps each weight in pieces, and its file beside the optimizer's state."""
    hf = hf_model(hf_config("qwen3", **GQA))
    run_import(save_hf(hf, tmp_path / "hf"), tmp_path / "ours")
    settings = dict(zero_optimization={"stage": 3})
    first, second = run_distributed(2, _train, str(tmp_path), settings, tmp_path=tmp_path)
    run_export(tmp_path / "trained", tmp_path / "back")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    logits = their_logits(trained, text()).numpy()
    assert np.abs(first - logits).max() <= FORWARD[torch.float32] and (first == second).all()
    assert np.abs(logits - their_logits(hf, text()).numpy()).max() > 0.1, "it was trained"
