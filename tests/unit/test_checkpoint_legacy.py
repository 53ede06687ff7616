"""Names of older GPT-NeoX versions: read as today's, in each form, for weights and for resuming."""

import io
import os

import numpy as np
import pytest
import torch

from megatron.checkpointing.legacy import current_file, current_names, stacks_branches
from megatron.checkpointing.reader import CheckpointReader
from megatron.errors import CheckpointError
from megatron.neox_arguments import NeoXArgs
from tests.helpers.configs import tiny_args
from tests.helpers.distributed import run_distributed
from tests.helpers.geometries import GQA_TP4, MHA_TP4
from tests.helpers.resharding import random_layers, settings_of, write_checkpoint
from tests.helpers.tolerances import LOSS
from tools.ckpts import reshard

STRAY = {
    "attention.rotary_emb.inv_freq": torch.ones(5),
    "attention.masked_bias": torch.tensor(-1e4),
    "attention.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool),
}


def older(state, gated):
    """One transformer layer's weights as older versions named them, stated once more and not by the code's table."""
    old = dict(STRAY)
    for name, tensor in state.items():
        if gated and name.startswith("mlp.linear1"):
            kind = name.rsplit(".", 1)[1]
            old[f"mlp.w3.{kind}"], old[f"mlp.w1.{kind}"] = (half.clone() for half in tensor.chunk(2))
        elif name.startswith("mlp.linear"):
            one, two = ("mlp.linear1", "mlp.w2") if gated else ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
            old[name.replace("mlp.linear1", one).replace("mlp.linear2", two)] = tensor
        else:
            old[name] = tensor
    return old


def test_names():
    one, two, three = (torch.full((1, 2), value) for value in (1.0, 2.0, 3.0))
    state = {"mlp.w1.weight": one, "mlp.w2.weight": two, "mlp.w3.weight": three, "attention.dense.bias": one}
    found = current_names({**state, **STRAY})
    assert list(found) == [
        "mlp.linear2.weight",
        "mlp.linear1.weight",
        "attention.dense.bias",
        "attention.rotary_emb.inv_freq",
    ]
    assert found["mlp.linear1.weight"].tolist() == [[3.0, 3.0], [1.0, 1.0]], "[up; gate]: w3 above w1"
    prefixed = current_names({f"sequential.7.{name}": tensor for name, tensor in state.items()})
    assert prefixed["sequential.7.mlp.linear1.weight"].tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert stacks_branches(state) and not stacks_branches(found)
    assert current_names({"mlp.w3.weight": three}) == {"mlp.w3.weight": three}, "left for the comparison to report"
    kept = {"attention.query_key_value.bias": one, "attention.qk_layernorm.bias": two, "norm.bias": three}
    assert current_names(kept) == kept
    with pytest.raises(CheckpointError, match="mlp.linear2.weight twice"):
        current_names({"mlp.w2.weight": two, "mlp.linear2.weight": two})


def test_files():
    one = torch.ones(2)
    old = {"module": {"sequential.2.mlp.dense_h_to_4h.bias": one}, "iteration": 3}
    assert current_file(old) == {"module": {"sequential.2.mlp.linear1.bias": one}, "iteration": 3}
    layer = {"mlp.dense_4h_to_h.bias": one, "attention.rotary_emb.inv_freq": one}
    assert set(current_file(layer)) == {"mlp.linear2.bias", "attention.rotary_emb.inv_freq"}
    assert set(current_file(layer, keep_frequencies=False)) == {"mlp.linear2.bias"}
    assert current_file({"module": None, "iteration": 3}) == {"module": None, "iteration": 3}
    assert current_file([one]) == [one]


def test_extra_state_in_a_bytesio_becomes_a_tensor(tmp_path):
    """In GPT-NeoX's files with Transformer Engine: for an engine, and for the reader in both forms."""
    packed = io.BytesIO()
    torch.save({"scale": torch.ones(3)}, packed)
    packed.seek(0, io.SEEK_END)
    entries = {"attention.qkv._extra_state": packed, "mlp._extra_state": io.BytesIO(b"x")}
    layer = {"mlp.dense_h_to_4h.bias": torch.ones(2), **entries}
    settings = settings_of("mha")
    module = {f"sequential.2.{name}": value for name, value in layer.items()}
    write_checkpoint(tmp_path / "layers", {2: layer}, settings)
    write_checkpoint(tmp_path / "sequential", {}, settings, rank_state={"module": module})
    read = [CheckpointReader(str(tmp_path / form / "global_step5")).layer_state(2) for form in ("layers", "sequential")]
    whole = current_file({"module": module, "iteration": 3})["module"]
    for state in (current_file(layer), *read, {name.removeprefix("sequential.2."): t for name, t in whole.items()}):
        assert set(state) == {"mlp.linear1.bias", *entries}
        for name, entry in entries.items():
            assert state[name].dtype == torch.uint8 and state[name].numpy().tobytes() == entry.getvalue()
    assert current_names({"mlp._extra_state": io.BytesIO()})["mlp._extra_state"].numel() == 0
    elsewhere = {"mlp.linear1.bias": torch.ones(2), "mlp.linear1.weight": packed}
    assert current_file(elsewhere) is elsewhere
    write_checkpoint(tmp_path / "other", {2: elsewhere}, settings)
    with pytest.raises(CheckpointError, match="does not hold a layer"):
        CheckpointReader(str(tmp_path / "other" / "global_step5")).layer_state(2)


def _write_old(save, variant, sequential):
    """(settings, today's layers) of a checkpoint written with old names."""
    settings = settings_of(variant)
    layers = random_layers(NeoXArgs.from_dict(settings))
    gated = "gated" in variant
    old = {index: older(state, gated) if index in (2, 3) else state for index, state in layers.items()}
    module = {f"sequential.{i}.{name}": tensor for i, state in old.items() for name, tensor in state.items()}
    write_checkpoint(save, {} if sequential else old, settings, rank_state={"module": module if sequential else None})
    return settings, layers


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("variant", ["mha", "mha gpt_j", "gqa gated rms"])
def test_reader_and_tool_give_todays_names(variant, sequential, tmp_path):
    _, layers = _write_old(tmp_path / "old", variant, sequential)
    arguments = [str(tmp_path / "old"), str(tmp_path / "new"), "--model-parallel-size=1", "--pipe-parallel-size=0"]
    assert reshard.main(arguments) == 0
    for folder in ("old", "new"):
        reader = CheckpointReader(str(tmp_path / folder / "global_step5"))
        assert reader.stacks_branches == (folder == "old" and "gated" in variant)
        assert reader.layer_indices() == list(layers)
        for index, expected in layers.items():
            state = reader.layer_state(index)
            state.pop("attention.rotary_emb.inv_freq", None)
            assert set(state) == set(expected)
            assert all(torch.equal(state[name], expected[name]) for name in expected)
            assert all(torch.equal(reader.tensor(index, name), expected[name]) for name in expected)
            assert list(reader.layer_shapes(index)) == list(reader.layer_state(index))


def _load(rank, world_size, root, names):
    """The largest difference of each model's weights from today's, after loading old ones."""
    from megatron.checkpointing import load_model_weights
    from megatron.initialize import initialize_megatron
    from megatron.model.gpt2_model import build_model

    found = {}
    for name in names:
        for tp_pp in ((1, 0), (1, 1)) if world_size == 1 else ((2, 0),):
            layout = dict(model_parallel_size=tp_pp[0], pipe_parallel_size=tp_pp[1], global_num_gpus=world_size)
            layout.update(padded_vocab_size=128 * world_size)
            states = []
            for form in ("old", "today"):
                args = NeoXArgs.from_dict(settings_of(name, load=os.path.join(root, name, form), **layout))
                initialize_megatron(args)
                model = build_model(args)
                load_model_weights(args, model)
                states.append(dict(model.state_dict()))
            assert set(states[0]) == set(states[1])
            found[name, tp_pp] = max((states[0][k] - states[1][k]).abs().max().item() for k in states[0])
    return found


def test_models_load_old_names_at_any_size(tmp_path):
    names = ["mha", "gqa gated rms", "gqa frequencies"]
    for name in names:
        settings, layers = _write_old(tmp_path / name / "old", name, sequential=name == "mha")
        write_checkpoint(tmp_path / name / "today", layers, settings)
    for ranks in (1, 2):
        for found in run_distributed(ranks, _load, str(tmp_path), names, tmp_path=tmp_path):
            assert len(found) == (6 if ranks == 1 else 3)
            for (name, layout), difference in found.items():
                # where the model keeps the frequencies, the old file's stray ones (all 1) are loaded, and not used
                assert difference == 0.0 or name == "gqa frequencies", (name, layout)


RUNS = {
    "sequential": dict(**MHA_TP4, pipe_parallel_size=0),
    "pipeline": dict(**MHA_TP4, pipe_parallel_size=1),
    "zero": dict(**MHA_TP4, pipe_parallel_size=1, zero_optimization={"stage": 1}),
    "gated": dict(**GQA_TP4, pipe_parallel_size=1, activation="swiglu", ffn_hidden_size=44),
}


def _rename_files(folder, gated):
    """Rewrite a saved step with old names."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(("layer_02", "layer_03")):
            torch.save(older(torch.load(path, weights_only=True), gated), path)
        elif name.startswith("mp_rank"):
            state = torch.load(path, weights_only=False)
            for index in (2, 3) if state["module"] else ():
                prefix = f"sequential.{index}."
                layer = {
                    n[len(prefix) :]: state["module"].pop(n) for n in list(state["module"]) if n.startswith(prefix)
                }
                state["module"].update({prefix + n: tensor for n, tensor in older(layer, gated).items()})
            torch.save(state, path)


def _resume(rank, world_size, root):
    """{run: (loss of the step after saving, the same after resuming from old names)}; an error instead of a loss."""
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine, train

    found = {}
    common = dict(seq_length=16, max_position_embeddings=16, checkpoint_factor=10)
    common["optimizer"] = {"type": "adam", "params": {"lr": 3e-2}}
    for name, settings in RUNS.items():
        folder = os.path.join(root, name)
        args = tiny_args(**common, **settings, save=folder)
        engine = build_engine(args)
        train(args, engine, 2)
        save_checkpoint(args, 2, engine)
        expected = train(args, engine, 2, first=2)
        _rename_files(os.path.join(folder, "global_step2"), name == "gated")
        try:
            args = tiny_args(**common, **settings, load=folder, seed=99)
            found[name] = expected, train(args, build_engine(args), 2, first=2)
        except CheckpointError as error:
            found[name] = expected, str(error)
    args = tiny_args(**common, **RUNS["gated"], load=os.path.join(root, "gated"), seed=99, no_load_optim=True)
    found["gated, weights"] = found["gated"][0], train(args, build_engine(args), 1, first=2)
    return found


def test_training_goes_on_from_old_names(tmp_path):
    (found,) = run_distributed(1, _resume, str(tmp_path), tmp_path=tmp_path)
    for name in ("sequential", "pipeline", "zero"):
        expected, resumed = found[name]
        assert np.abs(np.subtract(expected, resumed)).max() <= LOSS, name
    assert "mlp.w1 and mlp.w3" in found["gated"][1] and "no_load_optim=true" in found["gated"][1]
    expected, resumed = found["gated, weights"]
    assert abs(expected[0] - resumed[0]) <= LOSS
