"""Checkpoints written by GPT-NeoX itself are read: every case, both forms, any pipeline size."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import CheckpointReader, load_model_weights
from megatron.checkpointing.reader import layer_file
from megatron.errors import CheckpointError
from megatron.initialize import initialize_megatron
from megatron.model.gpt2_model import build_model
from tests.golden import cases
from tests.helpers.distributed import run_distributed
from tests.helpers.tolerances import FORWARD

RANK_FILES = Path(__file__).parent / "data_checkpoint"
LAYERS = (0, 2, 3, 5, 6)


def write_layers(root, case, tp):
    """A folder with GPT-NeoX's files of pipe_parallel_size 1, and `latest`."""
    folder = Path(root) / "global_step0"
    (folder / "configs").mkdir(parents=True)
    cases.write_checkpoint(case, tp, folder)
    shutil.copy(cases.DATA / case / "config.yml", folder / "configs")
    if case not in cases.VOCABULARY:
        for rank in range(tp):
            name = f"mp_rank_{rank:02d}_model_states.pt"
            shutil.copy(RANK_FILES / f"tp{tp}_{name}", folder / name)
    (Path(root) / "latest").write_text("global_step0")
    return str(root)


def write_sequential(root, case, tp):
    """The same weights in the form of pipe_parallel_size 0: `module` of the mp_rank files."""
    folder = Path(write_layers(root, case, tp)) / "global_step0"
    for rank in range(tp):
        path = folder / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(path, weights_only=False)
        state["module"] = {}
        for index in LAYERS:
            layer = folder / layer_file(index, rank)
            tensors = torch.load(layer, weights_only=True)
            state["module"].update({f"sequential.{index}.{name}": tensor for name, tensor in tensors.items()})
            layer.unlink()
        torch.save(state, path)
    return str(root)


def _logits(case, tp, pp, root, **settings):
    args = cases.arguments(case, tp, pp, load=root, tokenizer_type="CharLevelTokenizer", **settings)
    initialize_megatron(args)
    model = build_model(args)
    assert load_model_weights(args, model) == 0
    return args, model


def _differences(rank, world_size, tp, folder, cases_and_forms):
    from megatron import mpu

    found = {}
    for case, form, pp in cases_and_forms:
        args, model = _logits(case, tp, pp, os.path.join(folder, f"{case}_{form}"))
        tokens, _ = cases.tokens_and_labels(case)
        logits = model((tokens, torch.arange(tokens.shape[1]).expand_as(tokens)))
        logits = mpu.gather_from_model_parallel_region(logits.detach())
        found[case, form, pp] = (logits[:, ::4] - cases.expected(case, tp)[0]).abs().max().item()
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_from_gpt_neox_files(tp, tmp_path):
    """pipe_parallel_size 0 and 1 each read what both wrote."""
    names = cases.TP1 if tp == 1 else cases.TP2
    for case in names:
        write_layers(tmp_path / f"{case}_layers", case, tp)
        if case not in cases.VOCABULARY:
            write_sequential(tmp_path / f"{case}_sequential", case, tp)
    runs = [(case, form, pp) for case in names for form in ("layers", "sequential") for pp in (0, 1)]
    runs = [run for run in runs if (tmp_path / f"{run[0]}_{run[1]}").exists()]
    for rank, found in enumerate(run_distributed(tp, _differences, tp, str(tmp_path), runs, tmp_path=tmp_path)):
        assert set(found) == set(runs)
        wrong = {run: value for run, value in found.items() if not value <= FORWARD[torch.float32]}
        assert not wrong, f"rank {rank}"


def _stage_weights(rank, world_size, root):
    _, model = _logits("case5_headdim32_gqa", 1, 2, root)
    return {
        (index, name): tensor.numpy()
        for index, layer in model.local_layers()
        if isinstance(layer, torch.nn.Module)
        for name, tensor in layer.state_dict().items()
    }


def test_two_stages_read_the_sequential_form(tmp_path):
    root = write_sequential(tmp_path / "ckpt", "case5_headdim32_gqa", 1)
    stages = run_distributed(2, _stage_weights, root, tmp_path=tmp_path)
    loaded = {key: value for stage in stages for key, value in stage.items()}
    expected = {
        (index, name): tensor
        for index in LAYERS
        for name, tensor in cases.layer_state("case5_headdim32_gqa", 1, 0, index).items()
    }
    assert set(loaded) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(torch.from_numpy(loaded[key]), tensor), key


def test_reader_gives_the_same_from_both_forms(tmp_path):
    layers = CheckpointReader(write_layers(tmp_path / "a", "case2_llama_gqa", 2) + "/global_step0")
    sequential = CheckpointReader(write_sequential(tmp_path / "b", "case2_llama_gqa", 2) + "/global_step0")
    assert layers.is_layered and not sequential.is_layered
    assert (layers.pipe_parallel_size, sequential.pipe_parallel_size) == (1, 0)
    for reader in (layers, sequential):
        assert reader.model_parallel_size == 2
        assert reader.layer_indices() == list(LAYERS)
        assert reader.iteration == 0
        assert reader.args["num_attention_heads"] == 4
        assert reader.config()["num_kv_heads"] == 2
        assert reader.stamp() is None
        assert reader.layer_state(1) == {}
    for index in LAYERS:
        for rank in (0, 1):
            expected = cases.layer_state("case2_llama_gqa", 2, rank, index)
            for reader in (layers, sequential):
                state = reader.layer_state(index, rank)
                assert set(state) == set(expected)
                assert all(torch.equal(state[name], expected[name]) for name in expected)


def _refusals(rank, world_size, folder):
    case = "case5_headdim32_gqa"
    layers = write_layers(os.path.join(folder, "refused"), case, 1)
    lacking = write_layers(os.path.join(folder, "lacking"), case, 1)
    os.remove(os.path.join(lacking, "global_step0", layer_file(3, 0)))
    path = os.path.join(lacking, "global_step0", layer_file(2, 0))
    state = torch.load(path, weights_only=True)
    state["mlp.w3.weight"] = state.pop("mlp.linear1.weight")
    torch.save(state, path)
    rotten = write_layers(os.path.join(folder, "rotten"), case, 1)
    path = Path(rotten) / "global_step0" / layer_file(3, 0)
    needle = torch.load(path, weights_only=True)["mlp.linear2.weight"].numpy().tobytes()[:16]
    path.write_bytes(path.read_bytes().replace(needle, bytes(16)))
    return {
        "rotten": _message(case, rotten),
        "swapped": _message(case, layers, num_attention_heads=8, head_dim=16, num_kv_heads=4),
        "mlp": _message(case, layers, intermediate_size=384),
        "args": _message(case, layers, max_position_embeddings=64),
        "lacking": _message(case, lacking),
    }


def _message(case, root, **settings):
    args = cases.arguments(case, 1, 0, **{"load": root, **settings})
    initialize_megatron(args)
    model = build_model(args)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        load_model_weights(args, model)
    except CheckpointError as error:
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        return str(error)
    return ""


def test_other_models_are_refused_before_anything_changes(tmp_path):
    (found,) = run_distributed(1, _refusals, str(tmp_path), tmp_path=tmp_path)
    assert "head_dim: 32 in the checkpoint, 16 in the config" in found["swapped"], "their shapes are equal"
    assert "num_attention_heads: 4 in the checkpoint, 8 in the config" in found["swapped"]
    assert "max_position_embeddings: 32 in the checkpoint, 64 in the config" in found["args"]
    for layer in (2, 3):
        assert f"layer {layer} mlp.linear2.weight: shape [64, 96] in the checkpoint, [64, 128]" in found["mlp"]
    assert "does not have its checksum" in found["rotten"]
    assert "layer 2 mlp.linear1.weight: missing in the checkpoint" in found["lacking"]
    assert "layer 2 mlp.w3.weight: in the checkpoint, but this model has no such parameter" in found["lacking"]
    assert "layer 3 attention.dense.weight: missing in the checkpoint" in found["lacking"]


def _converted(rank, world_size, root):
    case, unlike = "case5_headdim32_gqa", []
    for precision, dtype in (("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        _, model = _logits(case, 1, 0, root, precision=precision)
        expected = {
            f"sequential.{index}.{name}": tensor.to(dtype)
            for index in LAYERS
            for name, tensor in cases.layer_state(case, 1, 0, index).items()
        }
        loaded = model.state_dict()
        assert set(loaded) == set(expected)
        unlike += [name for name in expected if not torch.equal(loaded[name], expected[name])]
    return unlike


def test_half_precision_models_take_rounded_weights(tmp_path):
    root = write_layers(tmp_path / "ckpt", "case5_headdim32_gqa", 1)
    assert run_distributed(1, _converted, root, tmp_path=tmp_path) == [[]]


def _continued(rank, world_size, source, target, tp):
    """Resume GPT-NeoX's run and save it again; what was resumed and what is in the new files."""
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine

    text = (cases.DATA / "case5_headdim32_gqa" / "config.yml").read_text()
    args = cases.arguments("case5_headdim32_gqa", tp, 1, load=source, save=target, config_files={"config.yml": text})
    engine = build_engine(args)
    restored = torch.get_rng_state().numpy()
    save_checkpoint(args, args.iteration, engine)
    return args.iteration, restored


def _kinds(value):
    """Keys and types, not the numbers, of a nested value."""
    if isinstance(value, dict):
        return [(key, _kinds(each)) for key, each in value.items()]
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_run_of_gpt_neox_continues_and_is_saved_in_the_same_files(tp, tmp_path):
    source = write_layers(tmp_path / "theirs", "case5_headdim32_gqa", tp)
    target = str(tmp_path / "ours")
    results = run_distributed(tp, _continued, source, target, tp, tmp_path=tmp_path)
    theirs, ours = Path(source) / "global_step0", Path(target) / "global_step0"
    assert (Path(target) / "latest").read_bytes() == b"global_step0"
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()} | {"head_geometry.json"}
    assert (ours / "configs" / "config.yml").read_text() == (theirs / "configs" / "config.yml").read_text()
    for path in sorted(theirs.glob("*.pt")):
        before = torch.load(path, weights_only=False)
        after = torch.load(ours / path.name, weights_only=False)
        assert list(before) == list(after), path.name
        for key in before:
            if key != "ds_config":
                assert _kinds(after[key]) == _kinds(before[key]), (path.name, key)
    for rank, (iteration, torch_state) in enumerate(results):
        state = torch.load(theirs / f"mp_rank_{rank:02d}_model_states.pt", weights_only=False)
        again = torch.load(ours / f"mp_rank_{rank:02d}_model_states.pt", weights_only=False)
        assert iteration == state["iteration"] == 0
        assert state["args"] == again["args"]
        assert torch.equal(torch.from_numpy(torch_state), state["torch_rng_state"])
        assert torch.equal(
            again["rng_tracker_states"]["model-parallel-rng"], state["rng_tracker_states"]["model-parallel-rng"]
        )
