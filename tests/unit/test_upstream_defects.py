"""Faults of GPT-NeoX that are not repeated here: the tests that no other file has, and where the others are.

A fault counts as one whatever a correct configuration does with it here: work, or be refused by name.
"""

import re
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import folders
from megatron.errors import ConfigError
from megatron.model.gpt2_model import GPT2ModelSequential
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.inference import INFERENCE_OVERRIDES
from tests.helpers.configs import tiny_args, tiny_values
from tests.helpers.geometries import MHA, MQA, NARROW

TESTS = Path(__file__).parents[1]
ELSEWHERE = {
    "a parallel residual without MLP biases loses the attention output": (
        "unit/test_attention_in_layer.py test_residual_forms_with_every_bias_switch"
    ),
    "an MLP without gate and without biases ends in a TypeError": "unit/test_mlp.py test_output_and_gradients",
    "bias_gelu_fusion without biases ends in a TypeError": "unit/test_mlp.py test_bias_gelu_fusion_without_a_bias",
    "the roundings of linear1 and linear2 do not fit": "unit/test_mlp.py test_widths_are_those_of_the_geometry",
    "no dropout in a branch without bias; a bound method is asked whether the layer trains": (
        "unit/test_attention_in_layer.py test_hidden_dropout_acts_on_both_branches_with_and_without_bias"
    ),
    "dropout in evaluation": "distributed/test_training_options.py test_evaluation_has_no_dropout",
    "row biases of a parallel residual act as their sum, which its checkpoints rely on (kept)": (
        "golden/test_model_golden.py test_tp2_row_biases_of_case1_differ_and_sum_to_the_tp1_bias"
    ),
    "row biases of a normal residual count once": (
        "distributed/test_model_tensor_parallel.py test_tensor_parallel_equals_one_rank"
    ),
    "the loss overwrites the logits": "distributed/test_mpu_cross_entropy.py test_equals_torch",
    "the KV cache of one prompt is still there for the next": (
        "unit/test_generation_model.py test_rows_and_prompts_in_a_row_give_what_each_gives_alone"
    ),
    "a wrong type ends in an AttributeError": "unit/test_config_types.py test_refused",
    "a key repeated with dashes in a later file wins in silence": (
        "unit/test_config_loading.py test_a_key_in_two_files_is_an_error_in_either_spelling"
    ),
    'attention_config [["global"]] ends in an IndexError': (
        "unit/test_config_validate.py test_refused_with_names_and_numbers"
    ),
    "a validation set of less than one batch divides by zero; the last sample of a set is never used": (
        "unit/test_data_iterators.py test_a_validation_set_of_one_short_document_works"
    ),
    "a set of exactly the samples needed gives a batch too few": (
        "unit/test_data_iterators.py test_exactly_the_samples_needed_are_all_used"
    ),
    "the character tokenizer uses what numpy has removed": "unit/test_tokenizer.py test_characters",
    "mp_rank files cannot be read since torch 2.6": (
        "golden/test_checkpoint_golden.py test_reader_gives_the_same_from_both_forms"
    ),
    "merging data sets loses their documents": (
        "unit/test_indexed_dataset.py test_merged_data_sets_keep_their_documents"
    ),
    "unpacked needs labels; whole documents ignore where the split begins": (
        "unit/test_gpt2_dataset.py test_whole_documents"
    ),
    "cpu_torch_adam is never chosen": "unit/test_optimizers.py test_adam_is_adamw",
    "positions begin at 0 again in cached decode with a pipeline": (
        "distributed/test_generation_parallel.py test_layouts_equal_one_process"
    ),
    "returned logits are indexed by the absolute position": (
        "unit/test_generation_stream.py test_logits_are_those_the_tokens_were_chosen_from"
    ),
    "stop_tokens are changed in place": (
        "unit/test_generation_stream.py test_stop_group_ends_the_row_before_its_last_token"
    ),
    "flash with grouped keys and qk-layernorm has shapes that do not fit": (
        "unit/test_generation_model.py test_every_kernel_and_norm"
    ),
    "the joint qk-layernorm depends on the tensor-parallel size (kept: checkpoints are trained so)": (
        "distributed/test_generation_parallel.py test_joint_qk_layernorm_on_two_ranks_with_and_without_cache"
    ),
    "no_save_optim saves the optimizer": "distributed/test_checkpoint_engine.py test_files_and_keys",
    "the first evaluation of a pipeline ends in a TypeError": (
        "distributed/test_training_layouts.py test_layouts_train_alike"
    ),
    "pipe_parallel_size 0 and 1 start from other weights": (
        "distributed/test_model_forms.py test_pipeline_and_sequential_form_are_equal"
    ),
    "a warm-up of less than one step gives a multiple of the learning rate": (
        "unit/test_learning_rates.py test_never_above_start_lr"
    ),
    "the cosine rises again after its end": "unit/test_learning_rates.py test_decays",
    "optimizer states are kept by the order of parameters (kept)": (
        "golden/test_checkpoint_out_golden.py test_parameters_are_in_the_order_of_gpt_neox"
    ),
}
"""The fault: file and test."""


@pytest.mark.parametrize("fault", ELSEWHERE)
def test_the_test_that_is_pointed_to_exists(fault):
    file, name = ELSEWHERE[fault].split()
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("bf16", [dict(precision="bfloat16"), dict(precision=None, bf16={"enabled": True})], ids=str)
@pytest.mark.parametrize(
    "overrides", [dict(zero_optimization=None), INFERENCE_OVERRIDES], ids=["training", "inference"]
)
def test_bfloat16_without_zero_optimization(bf16, overrides):
    """GPT-NeoX looks up the stage of None; its generate.py and eval.py set just that."""
    args = NeoXArgs.from_dict({**tiny_values(), **bf16, **overrides})
    assert args.params_dtype == torch.bfloat16
    assert args.zero_stage == args.deepspeed_config["zero_optimization"]["stage"] == 0
    assert args.deepspeed_config["bf16"]["enabled"]


def test_orthogonal_initialisation_builds_a_model():
    """GPT-NeoX passes its arguments shifted by one and always fails."""
    args = tiny_args(**NARROW, init_method="orthogonal", output_layer_init_method="scaled_orthogonal")
    model = GPT2ModelSequential(args)
    wide = model.state_dict()["sequential.2.attention.query_key_value.weight"].double()  # [192, 160]
    torch.testing.assert_close(wide.T @ wide, 2 * torch.eye(160).double(), atol=1e-5, rtol=0)
    dense = model.state_dict()["sequential.2.attention.dense.weight"].double()  # [160, 96]
    torch.testing.assert_close(dense.T @ dense, 2 / args.num_layers * torch.eye(96).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["global", "flash"])
def test_a_sliding_window_holds_without_pipeline(kind):
    """GPT-NeoX's pipe_parallel_size 0 forgets it, except in the flash kernel.

    Two layers of a window of 5 reach 10 tokens back, and what is further away changes nothing.
    """
    model = GPT2ModelSequential(tiny_args(**MHA, sliding_window_width=5, attention_config=[kind] * 2)).train()
    tokens = torch.arange(32).unsqueeze(0)
    other = tokens.clone()
    other[0, 3] = 99
    with torch.no_grad():
        one, two = (model((ids, torch.arange(32).unsqueeze(0)))[0] for ids in (tokens, other))
    changed = (one != two).any(-1).nonzero().flatten().tolist()
    assert changed == list(range(3, 3 + 10 + 1))


def test_rope_fusion_does_not_lose_the_position_in_cached_decode():
    """GPT-NeoX's fused kernel rotates each new token as if it were the first."""
    from tests.unit.test_generation_model import check_cached_equals_full_forward

    check_cached_equals_full_forward(dict(MQA, pos_emb="rotary", rope_fusion=True))


def test_data_impl_infer_gives_a_data_set(tmp_path):
    """The default; GPT-NeoX finds the format out and returns None."""
    from megatron.data.indexed_dataset import make_dataset
    from tests.unit.test_data_iterators import write

    assert NeoXArgs.from_dict(tiny_values()).data_impl == "infer"
    dataset = make_dataset(write(tmp_path / "text", [[5, 6, 7]]), "infer")
    assert dataset[0].tolist() == [5, 6, 7]


def test_old_checkpoints_of_a_folder_named_with_a_slash_at_the_end_are_removed(tmp_path):
    """GPT-NeoX strips the slash that begins an absolute path as well, and removes nothing (or elsewhere)."""
    for iteration in (1, 2, 3):
        (tmp_path / f"global_step{iteration}").mkdir()
    assert folders.remove_old(f"{tmp_path}/", keep=2, newest=3) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2", "global_step3"]


BROKEN_OR_WITHOUT_EFFECT = [
    # Fails whenever it is used.
    dict(checkpoint_validation_with_forward_pass=True),
    dict(soft_prompt_tuning={"enabled": True, "n_tokens": 10}),
    dict(log_gradient_noise_scale=True),
    # Accepted, and nothing happens.
    dict(mup_attn_temp=0.5),
    dict(mup_output_temp=0.5),
    dict(num_unique_layers=1),
    dict(param_sharing_style="spaced"),
    dict(use_bias_in_norms=False),
    # Wrong numbers: flash attention ignores muP's scale; the relative bias of sparse attention has another length.
    dict(use_mup=True),
    dict(attention_config=["sparse_fixed", "sparse_fixed"], pos_emb="rpe"),
]


@pytest.mark.parametrize("settings", BROKEN_OR_WITHOUT_EFFECT, ids=str)
def test_what_gpt_neox_breaks_or_ignores_is_refused_by_name(settings):
    name = next(iter(settings))
    with pytest.raises(ConfigError) as caught:
        tiny_args(**settings)
    assert any(problem.startswith(f"{name}=") for problem in caught.value.problems), caught.value.problems
