"""What finds head widths that are not the geometry's finds each spelling of one, and nothing else."""

import pytest

from tests.helpers.neox_patch_edits import patched
from tests.helpers.neox_patch_geometry import CHECKPOINTINGS, LAYER_LISTS, LOGGINGS
from tests.helpers.neox_patch_leftovers import leftovers
from tools.neox_patch.change import FILES
from tools.neox_patch.changes import checkpoints, flops, rpe

WIDTHS = [
    "mpu.divide(args.hidden_size, args.num_attention_heads)",
    "divide(numerator=args.hidden_size, denominator=args.num_attention_heads)",
    "args.hidden_size // args.num_kv_heads",
    "int(args.hidden_size / args.num_attention_heads)",
    "config.num_key_value_heads / config.num_attention_heads * config.hidden_size // config.num_attention_heads",
    "mpu.divide(args.hidden_size, world_size)",
    "args.hidden_size // tensor_parallel_size",
    "h // n",
]
OTHERS = [
    "args.num_attention_heads // args.num_kv_heads",
    "mpu.divide(args.num_attention_heads, world_size)",
    "math.ceil(args.hidden_size / 16)",
    "args.hidden_size % args.num_attention_heads",
    "args.hidden_size * args.num_attention_heads",
    "divide(output_size, world_size)",
    "args.dim_att // args.num_attention_heads",
    "loss / world_size",
]


def tree(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return root


@pytest.mark.parametrize("folder", ["megatron/model", "tools/ckpts", "eval_tasks", "post-training"])
def test_each_width_is_found(tmp_path, folder):
    text = "n = args.num_attention_heads\nh = args.hidden_size\n" + "".join(f"x = {code}\n" for code in WIDTHS)
    found = leftovers(tree(tmp_path, f"{folder}/a.py", text))
    assert {int(entry.split(":")[1]) for entry in found} == set(range(3, 3 + len(WIDTHS))), found
    assert all(entry.startswith(f"{folder}/a.py:") for entry in found)


def test_nothing_else_is_found(tmp_path):
    assert leftovers(tree(tmp_path, "megatron/a.py", "".join(f"x = {code}\n" for code in OTHERS))) == []


def test_nothing_is_left_where_the_patch_was(tmp_path):
    """And what is placed beside GPT-NeoX's files divides nothing."""
    assert leftovers(FILES) == []
    for spellings, module in ((LAYER_LISTS, rpe), (CHECKPOINTINGS, checkpoints)):
        for text in spellings.values():
            root = tree(tmp_path, "megatron/a.py", text)
            assert bool(leftovers(root)) == (module is rpe)
            assert leftovers(tree(tmp_path, "megatron/a.py", patched(module.CHANGES, text))) == []
    for text in LOGGINGS.values():
        changes = flops.CHANGES[: 1 + ("def get_forward_backward_flops" in text)]
        assert leftovers(tree(tmp_path, "megatron/a.py", patched(changes, text))) == []
