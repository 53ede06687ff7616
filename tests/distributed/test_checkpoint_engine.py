"""Saving and resuming a small DeepSpeed engine: exactness, bad input, a kill during a save."""

import multiprocessing
import os
import random
import signal
import time
from types import SimpleNamespace

from tests.helpers.checkpoints import plain_args, tiny_engine, tiny_steps
from tests.helpers.distributed import run_distributed


def _error(function, *args, **kwargs):
    from megatron.errors import CheckpointError

    try:
        function(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return ""


def _bad_input(rank, world_size, folder):
    from megatron.checkpointing import load_checkpoint, save_checkpoint

    root = os.path.join(folder, "run")
    args = plain_args(root, root)
    engine = tiny_engine()
    save_checkpoint(args, 1, engine)
    tiny_steps(engine, 2)
    save_checkpoint(args, 2, engine)
    path = os.path.join(root, "global_step2", "mp_rank_00_model_states.pt")
    found = {
        "none": load_checkpoint(plain_args(load=os.path.join(folder, "nothing")), engine),
        "first": load_checkpoint(args, tiny_engine(), iteration=1),
        "asked": _error(load_checkpoint, args, engine, iteration=7),
        "width": _error(load_checkpoint, args, tiny_engine(width=7)),
        "args": _error(
            load_checkpoint, plain_args(load=root, padded_vocab_size=256, tokenizer_type="HFTokenizer"), engine
        ),
        "tp": _error(load_checkpoint, plain_args(load=root, model_parallel_size=2), engine),
        "pp": _error(load_checkpoint, plain_args(load=root, pipe_parallel_size=1), engine),
        "zero": _error(load_checkpoint, args, tiny_engine(zero_stage=1)),
    }
    geometry = dict(hidden_size=64, num_attention_heads=8, head_dim=8)
    with open(path, "rb") as file:
        contents = file.read()
    with open(path, "wb") as file:
        changed = contents.index(engine.module.sequential[0].weight.detach().numpy().tobytes()[:16])
        file.write(contents[:changed] + bytes([contents[changed] ^ 1]) + contents[changed + 1 :])
    found["changed"] = _error(load_checkpoint, args, engine)
    with open(path, "wb") as file:
        file.write(contents[: len(contents) // 2])
    found["geometry"] = _error(load_checkpoint, plain_args(load=root, geometry=geometry), engine)
    found["cut"] = _error(load_checkpoint, args, engine)
    os.remove(path)
    found["gone"] = _error(load_checkpoint, args, engine)
    return found


def test_bad_input_is_named(tmp_path):
    (found,) = run_distributed(1, _bad_input, str(tmp_path), tmp_path=tmp_path)
    assert found["none"] == 0
    assert found["first"] == 1
    assert "iterations available: 1, 2" in found["asked"]
    assert "layer 0 weight: shape [6, 6] in the checkpoint, [7, 7] in the model" in found["width"]
    assert "layer 1 weight: shape [1, 6] in the checkpoint, [1, 7] in the model" in found["width"]
    assert "padded_vocab_size: 128 in the checkpoint, 256 in the config" in found["args"]
    assert "tokenizer_type: 'CharLevelTokenizer' in the checkpoint, 'HFTokenizer' in the config" in found["args"]
    assert "model_parallel_size: 1 in the checkpoint, 2 in the config" in found["tp"]
    assert "pipe_parallel_size: 0 in the checkpoint, 1 in the config" in found["pp"]
    assert "zero_optimization.stage: 0 in the checkpoint, 1 in the config" in found["zero"]
    assert "head_dim: 16 in the checkpoint, 8 in the config" in found["geometry"], "before the broken file is opened"
    assert "damaged or not complete" in found["cut"]
    assert "does not have its checksum" in found["changed"]
    assert "holds no model" in found["gone"]


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _hostile(rank, world_size, folder):
    """Code in a file that only DeepSpeed's own loader opens."""
    import torch

    from megatron.checkpointing import load_checkpoint, save_checkpoint

    args = plain_args(os.path.join(folder, "run"), os.path.join(folder, "run"))
    engine = tiny_engine(zero_stage=1)
    save_checkpoint(args, 1, engine)
    path = os.path.join(args.save, "global_step1", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    state = torch.load(path, weights_only=False)
    torch.save({**state, "extra": _Runs(os.path.join(folder, "trace"))}, path)
    fresh = tiny_engine(zero_stage=1)  # the engine that saved reads safely from then on
    return _error(load_checkpoint, args, fresh), os.path.exists(os.path.join(folder, "trace"))


def test_code_in_optimizer_files_does_not_run(tmp_path):
    ((message, ran),) = run_distributed(1, _hostile, str(tmp_path), tmp_path=tmp_path)
    assert not ran
    assert "refused" in message and "optim_states" in message


def _partitioned(rank, world_size, folder):
    """Odd numbers of elements, so that the last rank's pieces are padded."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from megatron.checkpointing import CheckpointReader, save_checkpoint

    args = plain_args(os.path.join(folder, "run"))
    engine = tiny_engine(width=5, zero_stage=3)
    tiny_steps(engine, 1, width=5)
    save_checkpoint(args, 1, engine)
    reader = CheckpointReader(os.path.join(args.save, "global_step1"))
    found = {f"sequential.{i}.{name}": each for i in (0, 1) for name, each in reader.layer_state(i).items()}
    expected = get_fp32_state_dict_from_zero_checkpoint(args.save)
    return [{name: each.tolist() for name, each in state.items()} for state in (found, expected)]


def test_partitioned_weights_are_joined_as_deepspeed_joins_them(tmp_path):
    for found, expected in run_distributed(2, _partitioned, str(tmp_path), tmp_path=tmp_path):
        assert len(expected["sequential.0.weight"]) == 5
        assert found == expected


def _files(rank, world_size, folder):
    import torch

    from megatron.checkpointing import load_checkpoint, save_checkpoint

    root = os.path.join(folder, "run")
    args = plain_args(root, root, keep_last_n_checkpoints=2)
    engine = tiny_engine()
    for iteration in (1, 2, 3, 3):
        save_checkpoint(args, iteration, engine)
    state = torch.load(os.path.join(root, "global_step3", "mp_rank_00_model_states.pt"), weights_only=False)
    listed = {name: sorted(os.listdir(os.path.join(root, name))) for name in os.listdir(root) if name != "latest"}
    other = os.path.join(folder, "other")
    without = plain_args(other, other, no_save_optim=True, no_save_rng=True)
    save_checkpoint(without, 5, engine)
    bare = torch.load(os.path.join(without.save, "global_step5", "mp_rank_00_model_states.pt"), weights_only=False)
    refused = _error(load_checkpoint, without, engine)
    without.no_load_optim = True
    refused_rng = _error(load_checkpoint, without, engine)
    without.no_load_rng = True
    reached = load_checkpoint(without, engine)
    without.finetune = True
    return SimpleNamespace(
        listed=listed,
        keys=sorted(state),
        args=state["args"],
        bare=(bare["optimizer"], sorted(bare)),
        config=open(os.path.join(root, "global_step3", "configs", "tiny.yml")).read(),
        refused=refused,
        refused_rng=refused_rng,
        reached=(reached, load_checkpoint(without, engine)),
    )


RNG_KEYS = {"random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states"}


def test_files_and_keys(tmp_path):
    (found,) = run_distributed(1, _files, str(tmp_path), tmp_path=tmp_path)
    names = ["configs", "head_geometry.json", "mp_rank_00_model_states.pt"]
    assert found.listed == {"global_step2": names, "global_step3": names}
    deepspeed_keys = set(found.keys) - RNG_KEYS - {"iteration", "args"}
    assert {"module", "optimizer", "lr_scheduler", "global_steps", "ds_config"} <= deepspeed_keys
    assert RNG_KEYS | {"iteration", "args"} <= set(found.keys)
    assert set(found.args) == {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "make_vocab_size_divisible_by",
        "padded_vocab_size",
        "tokenizer_type",
        "model_parallel_size",
    }
    assert found.config == "hidden-size: 64\n"
    assert found.bare[0] is None and not RNG_KEYS & set(found.bare[1])
    assert "no optimizer state" in found.refused
    assert "no_load_rng" in found.refused_rng
    assert found.reached == (5, 0), "finetune starts at 0"


def _no_space(rank, world_size, folder):
    from megatron.checkpointing import load_checkpoint, safe_load, save_checkpoint
    from megatron.errors import CheckpointError

    root = os.path.join(folder, "run")
    args = plain_args(root, root)
    engine = tiny_engine(zero_stage=1)
    save_checkpoint(args, 1, engine)
    really = safe_load.save_file

    def full(contents, path, zipped=True):
        if "pp_rank_1" in path:
            raise CheckpointError(f"cannot write {path}")
        really(contents, path, zipped)

    safe_load.save_file = full
    message = _error(save_checkpoint, args, 2, engine)
    safe_load.save_file = really
    return message, sorted(os.listdir(root)), load_checkpoint(args, engine)


def test_one_rank_that_cannot_write_fails_the_save_on_all(tmp_path):
    for message, names, reached in run_distributed(2, _no_space, str(tmp_path), tmp_path=tmp_path):
        assert "cannot write" in message
        assert reached == 1
        assert [name for name in names if "2" in name and "zero_to" not in name] == []


def _save_for_ever(store, root, attempt, loaded):
    """Report what loads, then save and save again until killed."""
    import torch.distributed as dist

    from megatron.checkpointing import load_checkpoint, save_checkpoint

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    engine = tiny_engine(seed=attempt, zero_stage=1)
    args = plain_args(root, root, keep_last_n_checkpoints=2)
    first = load_checkpoint(args, engine)
    loaded.put(first)
    for count in range(100000):
        tiny_steps(engine, 1)
        save_checkpoint(args, first + 1 + count // 2, engine)  # each iteration twice: overwriting is tested too


def test_killed_while_saving(tmp_path):
    """SIGKILL at a random moment; the next process loads what is there and goes on in the same folder."""
    root, context = str(tmp_path / "run"), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preload"])
    moments, loaded = random.Random(0), context.Queue()
    before = 0
    for attempt in range(5):
        arguments = (str(tmp_path / f"store{attempt}"), root, attempt, loaded)
        process = context.Process(target=_save_for_ever, args=arguments, daemon=True)
        process.start()
        try:
            reached = loaded.get(timeout=60)  # nothing arrives if the checkpoint does not load
            assert reached >= before
            if attempt > 0:
                assert reached > 0
            first_saved = os.path.join(root, f"global_step{reached + 1}")
            deadline = time.monotonic() + 60
            while not (os.path.exists(first_saved) or time.monotonic() > deadline):
                time.sleep(0.005)
            time.sleep(moments.uniform(0.0, 0.3))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        before = reached
