"""From a checkpoint and its YAML files to the arguments of a model that only has to compute.

A training config is full of settings that concern the machine and the run it was made for: data paths, batch sizes,
host files, loggers. Here only those are taken that decide which function the weights are.
"""

import os
from typing import Any, Dict, List, Mapping, Optional, Sequence

from megatron.checkpointing.folders import find_checkpoint
from megatron.checkpointing.reader import CheckpointReader
from megatron.errors import CheckpointError, ConfigError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.fields import defaults
from megatron.neox_arguments.loading import load_files, nearest
from megatron.neox_arguments.support import BUILT_ATTENTION_KINDS

FUNCTION_SETTINGS = frozenset(
    """
    num_layers hidden_size num_attention_heads num_kv_heads head_dim softmax_scale intermediate_size ffn_hidden_size
    mlp_multiple_of expansion_factor seq_length max_position_embeddings sliding_window_width norm use_qk_layernorm
    layernorm_epsilon rms_norm_epsilon scalenorm_epsilon pos_emb rpe_num_buckets rpe_max_distance opt_pos_emb_offset
    rotary_pct rotary_emb_base rotary_save_freqs_buffer no_weight_tying attention_config activation bias_gelu_fusion
    apply_query_key_layer_scaling attention_softmax_in_fp32 gpt_j_residual gpt_j_tied use_bias_in_attn_linear
    use_bias_in_mlp qk_norm_type layer_types no_rope_layers rope_scaling rotary_denominator_scale attn_logit_softcap
    final_logit_softcap zero_centered_gamma norm_placement embedding_multiplier add_qkv_bias use_bias_in_output_layer
    te_mha te_layernorm_mlp output_layer_parallelism lora v_norm shared_key_value layer_scalar
    make_vocab_size_divisible_by tokenizer_type
    """.split()
)
"""What the weights compute. The last two only name the vocabulary, which a checkpoint records."""

UNBUILT_FUNCTION_SETTINGS = frozenset(
    """
    moe_num_experts soft_prompt_tuning sparsity_config use_mup
    """.split()
)
"""Kept as well, so that a model of a kind that is not built is refused by name instead of computed wrongly."""

_RECORDED = ("tokenizer_type", "make_vocab_size_divisible_by")


def checkpoint_folder(path: str, iteration: Optional[int] = None) -> str:
    """The folder with the weights: `path` itself, or the checkpoint in it that `iteration` or `latest` names.

    Raises CheckpointError if there is none.
    """
    if not os.path.isdir(path):
        raise CheckpointError(f"{path}: no such folder")
    if any(name.endswith("model_states.pt") for name in os.listdir(path)):
        return path
    folder = find_checkpoint(path, iteration)
    if folder is None:
        raise CheckpointError(f"{path} holds no checkpoint: neither *_model_states.pt nor a folder global_step<N>")
    return folder


def config_paths(folder: str) -> List[str]:
    """The YAML and JSON files that GPT-NeoX keeps beside the weights. Raises CheckpointError if there are none."""
    kept = os.path.join(folder, "configs")
    names = sorted(os.listdir(kept)) if os.path.isdir(kept) else []
    if not names:
        raise CheckpointError(f"{kept} holds no config; name the model's YAML files with --config")
    return [os.path.join(kept, name) for name in names]


def function_settings(values: Mapping[str, Any]) -> Dict[str, Any]:
    """The settings among `values` that decide what the weights compute.

    Which attention kernel is used does not: they all become "global". Nor does FP8; but te_fp8_mha means te_mha too,
    whose weights are other ones. Raises ConfigError for names that no setting has, because one of them could be a
    setting of the model, misspelled.
    """
    known = defaults()
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ConfigError([_unknown(name, known) for name in unknown])
    wanted = FUNCTION_SETTINGS | UNBUILT_FUNCTION_SETTINGS
    settings = {name: value for name, value in values.items() if name in wanted}
    if settings.get("attention_config") is not None:
        settings["attention_config"] = _without_kernels(settings["attention_config"])
    if values.get("te_fp8_mha"):
        settings["te_mha"] = True
    return settings


def inference_args(
    reader: CheckpointReader,
    configs: Sequence[str] = (),
    model_parallel_size: Optional[int] = None,
    precision: str = "fp32",
    length: int = 1,
    changes: Optional[Mapping[str, Any]] = None,
) -> NeoXArgs:
    """Arguments of the checkpoint's model, to be run by `model_parallel_size` processes without pipeline.

    configs: paths of the YAML files, merged; by default those in the checkpoint. model_parallel_size: by default the
    checkpoint's. length: tokens in a row; seq_length is raised to it where the positions allow it. changes: settings
    that win over the files.

    Raises ConfigError for faulty settings, CheckpointError without any.
    """
    settings = function_settings(load_files(configs or config_paths(reader.folder))[0])
    recorded = {name: reader.args[name] for name in _RECORDED if name in reader.args}
    ranks = model_parallel_size or reader.model_parallel_size
    return NeoXArgs.from_dict(
        {
            **settings,
            **recorded,
            "seq_length": _seq_length(settings, length),
            "padded_vocab_size": vocabulary_rows(reader),
            "precision": precision,
            "model_parallel_size": ranks,
            "pipe_parallel_size": 0,
            "global_num_gpus": ranks,
            "train_micro_batch_size_per_gpu": 1,
            "distributed_backend": "gloo",
            "use_cpu_initialization": True,
            **(changes or {}),
        }
    )


def vocabulary_rows(reader: CheckpointReader) -> int:
    """The padded vocabulary, from the embedding: its rows on all tensor-parallel ranks together.

    Raises CheckpointError if there is no embedding.
    """
    rows = 0
    for rank in range(reader.model_parallel_size):
        table = reader.layer_shapes(0, rank).get("word_embeddings.weight")
        if table is None:
            raise CheckpointError(f"{reader.folder} has no word_embeddings.weight in layer 0 of rank {rank}")
        rows += table.shape[0]
    return rows


def _seq_length(settings: Mapping[str, Any], length: int) -> Optional[int]:
    configured, limit = settings.get("seq_length"), settings.get("max_position_embeddings")
    if not isinstance(configured, int) or not isinstance(limit, int):
        return configured  # NeoXArgs says what is missing or wrong
    if length > max(configured, limit):
        raise ConfigError(
            f"max_position_embeddings={limit}: rows of {length} tokens are longer than the model's positions; shorten "
            "them (if their last token is only there to be predicted, say so: labels-from-tokens)"
        )
    return max(configured, length)


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    close = nearest(name, known)
    hint = f"did you mean {close}? " if close else ""
    return f"{name} is not a setting; {hint}remove or correct it in a copy of the config and name that with --config"


def _without_kernels(attention: Any) -> Any:
    if isinstance(attention, (list, tuple)):
        return [_without_kernels(item) for item in attention]
    return "global" if isinstance(attention, str) and attention.lower() in BUILT_ATTENTION_KINDS else attention
