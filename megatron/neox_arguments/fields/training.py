"""TODO: one line on this group."""

from dataclasses import dataclass
from typing import Literal, Optional, Union


@dataclass
class NeoXArgsTraining:
    """TODO: what these arguments are for."""

    data_path: Optional[str] = None
    """TODO."""

    use_shared_fs: bool = True
    """TODO."""

    train_data_paths: Optional[list] = None
    """TODO."""

    train_label_data_paths: Optional[list] = None
    """TODO."""

    train_reward_data_paths: Optional[list] = None
    """TODO."""

    test_data_paths: Optional[list] = None
    """TODO."""

    test_label_data_paths: Optional[list] = None
    """TODO."""

    test_reward_data_paths: Optional[list] = None
    """TODO."""

    valid_data_paths: Optional[list] = None
    """TODO."""

    valid_label_data_paths: Optional[list] = None
    """TODO."""

    valid_reward_data_paths: Optional[list] = None
    """TODO."""

    pos_train_data_paths: Optional[list] = None
    """TODO."""

    neg_train_data_paths: Optional[list] = None
    """TODO."""

    pos_train_label_data_paths: Optional[list] = None
    """TODO."""

    neg_train_label_data_paths: Optional[list] = None
    """TODO."""

    pos_valid_data_paths: Optional[list] = None
    """TODO."""

    neg_valid_data_paths: Optional[list] = None
    """TODO."""

    pos_valid_label_data_paths: Optional[list] = None
    """TODO."""

    neg_valid_label_data_paths: Optional[list] = None
    """TODO."""

    pos_test_data_paths: Optional[list] = None
    """TODO."""

    neg_test_data_paths: Optional[list] = None
    """TODO."""

    pos_test_label_data_paths: Optional[list] = None
    """TODO."""

    neg_test_label_data_paths: Optional[list] = None
    """TODO."""

    train_data_weights: Optional[list] = None
    """TODO."""

    valid_data_weights: Optional[list] = None
    """TODO."""

    test_data_weights: Optional[list] = None
    """TODO."""

    weight_by_num_documents: bool = False
    """TODO."""

    weighted_sampler_alpha: float = 1.0
    """TODO."""

    data_impl: Literal["infer", "mmap", "cached"] = "infer"
    """TODO."""

    pack_impl: Literal["packed", "pack_until_overflow", "unpacked"] = "packed"
    """TODO."""

    dataset_impl: Literal["gpt2", "pairwise", "online"] = "gpt2"
    """TODO."""

    train_impl: Literal["normal", "dpo", "rm", "kto", "reinforce"] = "normal"
    """TODO."""

    dpo_fp32: bool = True
    """TODO."""

    dpo_reference_free: bool = False
    """TODO."""

    dpo_beta: float = 0.1
    """TODO."""

    kto_fp32: bool = True
    """TODO."""

    kto_desirable_weight: float = 1.0
    """TODO."""

    kto_undesirable_weight: float = 1.0
    """TODO."""

    z_loss: float = 0.0
    """TODO."""

    kto_beta: float = 0.1
    """TODO."""

    fp32_reinforce: bool = True
    """TODO."""

    kl_impl: Literal["abs", "mse", "kl", "full"] = "mse"
    """TODO."""

    kl_div_beta: float = 0.1
    """TODO."""

    reinforce_leave_one_out: bool = False
    """TODO."""

    allow_chopped: bool = True
    """TODO."""

    mmap_warmup: bool = False
    """TODO."""

    save: Optional[str] = None
    """TODO."""

    s3_path: Optional[str] = None
    """TODO."""

    s3_chunk_size: int = 104857600
    """TODO."""

    config_files: Optional[dict] = None
    """TODO."""

    load: Optional[str] = None
    """TODO."""

    checkpoint_validation_with_forward_pass: bool = False
    """TODO."""

    checkpoint_scale: Literal["linear", "log"] = "linear"
    """TODO."""

    checkpoint_factor: Optional[Union[int, float]] = None
    """TODO."""

    extra_save_iters: Optional[list] = None
    """TODO."""

    no_save_optim: bool = False
    """TODO."""

    no_save_rng: bool = False
    """TODO."""

    no_load_optim: bool = False
    """TODO."""

    no_load_rng: bool = False
    """TODO."""

    finetune: bool = False
    """TODO."""

    batch_size: Optional[int] = None
    """TODO."""

    train_iters: Optional[int] = None
    """TODO."""

    train_epochs: Optional[int] = None
    """TODO."""

    eval_iters: int = 100
    """TODO."""

    keep_last_n_checkpoints: Optional[int] = None
    """TODO."""

    eval_interval: int = 1000
    """TODO."""

    split: str = "969, 30, 1"
    """TODO."""

    vocab_file: Optional[str] = None
    """TODO."""

    merge_file: Optional[str] = None
    """TODO."""

    num_workers: int = 2
    """TODO."""

    exit_interval: Optional[int] = None
    """TODO."""

    attention_dropout: float = 0.0
    """TODO."""

    hidden_dropout: float = 0.0
    """TODO."""

    weight_decay: float = 0.1
    """TODO."""

    checkpoint_activations: bool = False
    """TODO."""

    checkpoint_num_layers: int = 1
    """TODO."""

    deepspeed_activation_checkpointing: bool = True
    """TODO."""

    contiguous_checkpointing: bool = False
    """TODO."""

    checkpoint_in_cpu: bool = False
    """TODO."""

    synchronize_each_layer: bool = False
    """TODO."""

    profile_backward: bool = False
    """TODO."""

    partition_activations: bool = False
    """TODO."""

    clip_grad: float = 1.0
    """TODO."""

    hysteresis: int = 2
    """TODO."""

    dynamic_loss_scale: Optional[bool] = None
    """TODO."""

    loss_scale: Optional[float] = None
    """TODO."""

    loss_scale_window: float = 1000.0
    """TODO."""

    min_scale: float = 1.0
    """TODO."""

    char_level_ppl: bool = False
    """TODO."""

    use_mup: bool = False
    """TODO."""

    coord_check: bool = False
    """TODO."""

    save_base_shapes: bool = False
    """TODO."""

    base_shapes_file: Optional[str] = None
    """TODO."""

    mup_init_scale: float = 1.0
    """TODO."""

    mup_attn_temp: float = 1.0
    """TODO."""

    mup_output_temp: float = 1.0
    """TODO."""

    mup_embedding_mult: float = 1.0
    """TODO."""

    mup_rp_embedding_mult: float = 1.0
    """TODO."""

    mup_width_scale: int = 2
    """TODO."""
