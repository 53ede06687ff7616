"""Every kind of setting that cannot work is refused with a message that names it and its numbers."""

import pytest

from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from tests.helpers import geometries
from tests.helpers.configs import tiny_args, tiny_values


def problems(**overrides):
    with pytest.raises(ConfigError) as caught:
        tiny_args(**overrides)
    return caught.value.problems


ZERO2 = {"stage": 2}
CASES = [
    # widths
    (dict(hidden_size=80, num_attention_heads=6), ("hidden_size=80", "num_attention_heads=6", "set head_dim")),
    (dict(head_dim=0), ("head_dim=0",)),
    (dict(head_dim=-8), ("head_dim=-8",)),
    (dict(head_dim=15), ("rotary_pct=1.0", "head_dim=15")),
    (dict(head_dim=16, rotary_pct=0.05), ("rotary_pct=0.05", "head_dim=16")),
    (dict(num_kv_heads=3), ("num_attention_heads=4", "num_kv_heads=3")),
    (dict(num_kv_heads=8), ("num_attention_heads=4", "num_kv_heads=8")),
    (dict(num_attention_heads=0, hidden_size=64), ("num_attention_heads=0",)),
    (dict(softmax_scale=0.0), ("softmax_scale=0.0",)),
    (dict(softmax_scale=-1.0), ("softmax_scale=-1.0",)),
    (dict(softmax_scale=float("inf")), ("softmax_scale=inf",)),
    (dict(ffn_hidden_size=96, intermediate_size=288), ("ffn_hidden_size=96", "intermediate_size=288")),
    (dict(ffn_hidden_size=100, mlp_multiple_of=64), ("ffn_hidden_size=100", "mlp_multiple_of=64")),
    (dict(intermediate_size=200, expansion_factor=2.0), ("intermediate_size=200", "expansion_factor=2.0")),
    (dict(seq_length=64), ("max_position_embeddings=32", "seq_length=64")),
    (dict(hidden_dropout=1.0), ("hidden_dropout=1.0",)),
    (dict(rotary_pct=1.5), ("rotary_pct=1.5",)),
    # layers
    (dict(attention_config=[[["flash"], 3]]), ("attention_config", "3 layers", "num_layers=2")),
    (dict(attention_config=[[["global", "flash", "flash"], "all"]]), ("attention_config", "num_layers=2")),
    (dict(attention_config=["global", "flush"]), ("attention_config", "flush")),
    (dict(attention_config=[["global"]]), ("attention_config", "one kind for each layer")),
    (dict(attention_config=[[["local"], 2]]), ("attention_config=local", "not built")),
    (dict(attention_config=["flash", "global"], pos_emb="alibi"), ("pos_emb=alibi", "flash")),
    (dict(attention_config=["flash", "global"], pos_emb="rpe"), ("pos_emb=rpe", "flash")),
    (dict(pos_emb="rpe", pipe_parallel_size=2), ("pos_emb=rpe", "pipe_parallel_size=2")),
    (dict(gpt_j_tied=True), ("gpt_j_tied", "gpt_j_residual")),
    (dict(fp16_lm_cross_entropy=True), ("fp16_lm_cross_entropy", "fp32")),
    # parallelism
    (dict(hidden_size=48, num_attention_heads=3, model_parallel_size=2), ("num_attention_heads=3", "size=2")),
    (dict(num_attention_heads=12, head_dim=8, num_kv_heads=4, model_parallel_size=6), ("num_kv_heads=4", "size=6")),
    (dict(ffn_hidden_size=95, model_parallel_size=2), ("95", "model_parallel_size=2")),
    (dict(padded_vocab_size=127, model_parallel_size=2), ("padded_vocab_size=127", "model_parallel_size=2")),
    (dict(pipe_parallel_size=3), ("pipe_parallel_size=3", "num_layers=2")),
    (dict(model_parallel_size=2, global_num_gpus=3), ("3 processes", "multiple of 2")),
    (
        dict(sequence_parallel=True, model_parallel_size=2, seq_length=31),
        ("sequence_parallel", "seq_length=31", "model_parallel_size=2"),
    ),
    (dict(zero_optimization=ZERO2, pipe_parallel_size=1), ("stage=2", "pipe_parallel_size=1")),
    (dict(zero_optimization={"stage": 3}, pipe_parallel_size=2), ("stage=3", "pipe_parallel_size=2")),
    (dict(zero_optimization={"stage": 4}), ("stage=4",)),
    (dict(zero_optimization={"stage": True}), ("stage=True",)),
    (dict(model_parallel_size=-1), ("model_parallel_size=-1",)),
    # batch
    (
        dict(train_batch_size=12, train_micro_batch_size_per_gpu=5),
        ("train_batch_size=12", "train_micro_batch_size_per_gpu=5"),
    ),
    (
        dict(train_batch_size=12, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1),
        ("train_batch_size=12", "gradient_accumulation_steps=1", "= 4"),
    ),
    (dict(train_micro_batch_size_per_gpu=None), ("train_micro_batch_size_per_gpu", "train_batch_size")),
    (dict(train_micro_batch_size_per_gpu=0), ("train_micro_batch_size_per_gpu=0",)),
    # precision
    (dict(precision="fp32", fp16={"enabled": True}), ("precision=fp32", "fp16")),
    (dict(precision="fp16", bf16={"enabled": True}), ("fp16", "bf16")),
    (dict(precision=None, fp16={"enabled": True}, bf16={"enabled": True}), ("fp16 and bf16",)),
    (dict(precision="fp16", deepspeed_extra_args={"fp16": {"enabled": False}}), ("precision=fp16", "extra_args")),
    (dict(precision=None, fp16={"loss_scale": 0}), ("fp16", "enabled")),
    (dict(precision=None, bf16={"enabled": True, "check_grad_owerflow": True}), ("did you mean check_grad_overflow",)),
    (dict(deepspeed_extra_args={"train_batch_size": 2}), ("deepspeed_extra_args.train_batch_size",)),
    # optimizer and schedule
    (dict(optimizer={"type": "adamm", "params": {}}), ("optimizer.type='adamm'", "adam")),
    (dict(optimizer={"type": "adam"}), ("optimizer.params",)),
    (dict(optimizer={"type": "adam", "params": {"lr": "fast"}}), ("optimizer.params.lr='fast'",)),
    (dict(optimizer={"type": "adam", "params": {"lr": True}}), ("optimizer.params.lr=True",)),
    (dict(optimizer={"type": "adam", "params": {"weight_decay": 0.1}}), ("weight_decay",)),
    (dict(min_lr=0.1), ("min_lr=0.1", "0.001")),
    (dict(lr=0.5), ("lr=0.5", "0.001", "optimizer.params.lr")),
    (dict(zero_stage=1), ("zero_stage=1", "zero_optimization.stage")),
    (dict(clip_grad=0.5), ("clip_grad=0.5", "gradient_clipping")),
    (dict(lr_decay_iters=5, lr_decay_fraction=0.5), ("lr_decay_iters=5", "lr_decay_fraction=0.5")),
    (dict(train_iters=5, train_epochs=1), ("train_iters=5", "train_epochs=1")),
    (dict(warmup=2.0), ("warmup=2.0",)),
    # data
    (dict(train_data_paths=["a"]), ("valid_data_paths", "test_data_paths")),
    (
        dict(train_data_paths=["a"], valid_data_paths=["b"], test_data_paths=["c"], data_path="d"),
        ("data_path=d", "train_data_paths"),
    ),
    (
        dict(train_data_paths=["a"], valid_data_paths=["b"], test_data_paths=["c"], train_data_weights=[1, 2]),
        ("train_data_weights has 2", "train_data_paths has 1"),
    ),
    (dict(data_path="d", train_label_data_paths=["a"]), ("train_label_data_paths", "train_data_paths")),
    # saving and generating
    (dict(save="x"), ("save=x", "checkpoint_factor")),
    (dict(save="x", checkpoint_factor=1, checkpoint_scale="log"), ("checkpoint_factor=1", "log")),
    (dict(save="x", checkpoint_factor=2.5), ("checkpoint_factor=2.5",)),
    (dict(save="x", checkpoint_factor=0), ("checkpoint_factor=0",)),
    (dict(extra_save_iters=[1, "2"]), ("extra_save_iters",)),
    (dict(checkpoint_activations=True, checkpoint_num_layers=3), ("checkpoint_num_layers=3", "num_layers=2")),
    (dict(contiguous_checkpointing=True), ("contiguous_checkpointing", "partition_activations")),
    (dict(text_gen_type="chat"), ("text_gen_type='chat'",)),
    (dict(text_gen_type="input-file"), ("sample_input_file",)),
    (dict(temperature=-0.5), ("temperature=-0.5",)),
    (dict(top_p=1.5), ("top_p=1.5",)),
    (dict(seed=-1), ("seed=-1",)),
    (dict(distributed_backend="ncl"), ("distributed_backend='ncl'",)),
    (dict(include="a", exclude="b"), ("include=a", "exclude=b")),
    (dict(account="me"), ("account=me", "slurm")),
    # refused features and names
    (dict(use_mup=True), ("use_mup=True", "not built")),
    (dict(moe_num_experts=4), ("moe_num_experts=4", "not built")),
    (dict(num_atention_heads=4), ("num_atention_heads", "did you mean num_attention_heads")),
    (dict(activation="gleu"), ("activation='gleu'", "gelu")),
    (dict(hidden_dropout=True), ("hidden_dropout=True", "number")),
]


@pytest.mark.parametrize("overrides, words", CASES, ids=[str(list(case[0])) + str(i) for i, case in enumerate(CASES)])
def test_refused_with_names_and_numbers(overrides, words):
    found = problems(**overrides)
    assert any(all(word in problem for word in words) for problem in found), found


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"])
def test_required(name):
    values = tiny_values()
    del values[name]
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict(values)
    assert caught.value.problems == [f"{name} is not set; it has no default"]


def test_all_problems_are_reported_together():
    found = problems(hiden_dropout=0.1, num_layers="2", head_dim=0, use_mup=True, min_lr=5.0, seq_length=64)
    for word in ("hiden_dropout", "num_layers='2'", "head_dim=0", "use_mup", "min_lr=5.0", "seq_length=64"):
        assert sum(word in problem for problem in found) == 1, (word, found)
    assert len(found) == 6


def test_a_misspelt_name_is_one_problem_not_two():
    values = tiny_values()
    values["num_layer"] = values.pop("num_layers")
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict(values)
    assert caught.value.problems == ["num_layer is not a known setting; did you mean num_layers?"]


ACCEPTED = [
    dict(gradient_accumulation_steps=None, train_batch_size=12, train_micro_batch_size_per_gpu=4),
    dict(train_batch_size=12, train_micro_batch_size_per_gpu=4),
    dict(activation="GeLU", norm="RMSNorm", lr_decay_style="Cosine"),
    dict(pos_emb="learned", head_dim=15),
    dict(zero_optimization={"stage": 1}, pipe_parallel_size=2),
    dict(zero_optimization={"stage": 3}, global_num_gpus=2),
    dict(sequence_parallel=True, model_parallel_size=2),
    dict(attention_config=[[["flash"], 2]]),
    dict(pos_emb="rpe", pipe_parallel_size=1),
    dict(precision=None, fp16={"fp16": True, "enabled": True, "loss_scale": 0, "hysteresis": 2}),
    dict(optimizer=None, zero_optimization=None, precision="bfloat16"),
    dict(save="x", extra_save_iters=[0, 1]),
    dict(weight_decay=0, gradient_clipping=0.0),
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=str)
def test_accepted(overrides):
    tiny_args(**overrides)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", geometries.ALL)
def test_tensor_parallel_sizes_are_accepted_exactly_when_heads_split(name, size):
    geometry = geometries.ALL[name]
    kv_heads = geometry.get("num_kv_heads", size)
    fits = geometry["num_attention_heads"] % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    assert fits == (size == 1 or name in {2: geometries.TP2, 4: geometries.TP4}[size])
    if fits:
        tiny_args(**geometry, model_parallel_size=size)
    else:
        assert any(
            f"model_parallel_size={size}" in problem for problem in problems(**geometry, model_parallel_size=size)
        )
