"""What is saved here consists of exactly what GPT-NeoX saved for the same configuration, plus head_geometry.json."""

import fnmatch
import json
from pathlib import Path

import pytest

from megatron.neox_arguments import NeoXArgs
from tests.golden import structure
from tests.helpers.distributed import run_distributed

DATA = Path(__file__).parent / "data_checkpoint"
SAVED = json.loads((DATA / "structure.json").read_text())
ORDER = json.loads((DATA / "parameter_order.json").read_text())
OURS = ("head_geometry.json",)
"""The file that GPT-NeoX does not write."""
OWN_STATES = "rng_states_dp_rank_1_mp_rank_00.pt"
"""With data parallelism there is one such file for each further replica."""
PATTERNS = ("*model_states.pt", "*optim_states.pt", "layer_*", "mp_rank_*", "zero_*", "bf16_zero_*", "expp_rank_*")
"""What DeepSpeed 0.19 looks for in a checkpoint's folder."""


def _save(rank, world_size, folder, names):
    """Two steps and a checkpoint for each case."""
    from megatron.checkpointing import save_checkpoint
    from tests.helpers.engines import build_engine, train

    for name in names:
        args = NeoXArgs.from_dict(
            {**SAVED[name]["settings"], "save": f"{folder}/{name}", "global_num_gpus": world_size}
        )
        args.build_tokenizer()
        engine = build_engine(args)
        train(args, engine, 2)
        save_checkpoint(args, 2, engine)


@pytest.mark.parametrize("world_size", [1, 2])
def test_files_keys_types_and_shapes_are_those_of_gpt_neox(world_size, tmp_path):
    names = [name for name, case in SAVED.items() if case["world_size"] == world_size]
    assert len(names) >= 2
    run_distributed(world_size, _save, str(tmp_path), names, tmp_path=tmp_path)
    for name in names:
        found, wanted = structure.of_checkpoint(tmp_path / name, "global_step2"), SAVED[name]
        assert found["beside"] == wanted["beside"], name
        replicas = world_size // wanted["settings"]["model_parallel_size"]
        extra = {*OURS, OWN_STATES} if replicas > 1 else {*OURS}
        assert set(found["files"]) == set(wanted["files"]) | extra, name
        for file, kinds in wanted["files"].items():
            assert structure.with_order(found["files"][file]) == structure.with_order(kinds), (name, file)


def test_the_cases_cover_both_forms_zero_and_replicas():
    layouts = {
        (case["settings"]["pipe_parallel_size"], case["settings"]["model_parallel_size"], case["world_size"])
        for case in SAVED.values()
    }
    assert {(0, 1, 1), (1, 1, 1), (1, 1, 2), (0, 2, 2), (1, 2, 2)} <= layouts
    assert any("zero_pp_rank_1_mp_rank_00_optim_states.pt" in case["files"] for case in SAVED.values())


def test_deepspeed_does_not_take_our_files_for_its_own():
    """It finds its files by pattern, in loading, in zero_to_fp32 and in its universal format."""
    for name in (*OURS, OWN_STATES):
        assert not [pattern for pattern in PATTERNS if fnmatch.fnmatch(name, pattern)]
    for name in {file for case in SAVED.values() for file in case["files"]}:
        assert name == "configs" or [pattern for pattern in PATTERNS if fnmatch.fnmatch(name, pattern)]


def test_deepspeeds_own_listing_is_the_same_with_and_without_our_files(tmp_path):
    from deepspeed.checkpoint.reshape_utils import get_files, get_files_with_prefix
    from deepspeed.utils.zero_to_fp32 import get_checkpoint_files

    (case,) = [case for case in SAVED.values() if "zero_pp_rank_1_mp_rank_00_optim_states.pt" in case["files"]]
    for folder, names in (("theirs", [*case["files"]]), ("ours", [*case["files"], *OURS, OWN_STATES])):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    listings = []
    for folder in ("theirs", "ours"):
        root = str(tmp_path / folder)
        found = [get_checkpoint_files(root, pattern) for pattern in ("*_optim_states.pt", "*_model_states.pt")]
        found += [get_files_with_prefix(get_files(root), prefix) for prefix in ("layer_", "mp_rank_", "zero_pp_rank_")]
        listings.append([[Path(path).name for path in paths] for paths in found])
    assert listings[0] == listings[1] and all(listings[0])


@pytest.mark.parametrize("name", ORDER["cases"])
def test_parameters_are_in_the_order_of_gpt_neox(name):
    """An optimizer's state is kept by the running number of the parameter in its group, not by its name."""
    from megatron.model.gpt2_model import GPT2ModelSequential
    from megatron.model.utils import get_params_for_weight_decay_optimization

    case = ORDER["cases"][name]
    args = NeoXArgs.from_dict({**ORDER["settings"], **case["settings"]})
    args.build_tokenizer()
    model = GPT2ModelSequential(args)
    names = {id(parameter): name.removeprefix("sequential.") for name, parameter in model.named_parameters()}
    groups = [
        {
            "weight_decay": group.get("weight_decay", args.weight_decay),
            "parameters": [names[id(parameter)] for parameter in group["params"]],
        }
        for group in get_params_for_weight_decay_optimization(model, args)
    ]
    assert groups == case["groups"]
    assert [key.removeprefix("sequential.") for key in model.state_dict()] == case["state_dict"]
