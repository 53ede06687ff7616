"""Data, objective, checkpoints, the training loop and numerical settings."""

from dataclasses import dataclass
from typing import Literal, Optional, Union


@dataclass
class NeoXArgsTraining:
    """Data sets, training objective, saving and loading, loop lengths, dropout, activation checkpointing, loss scaling,
    muP."""

    data_path: Optional[str] = None
    """Path of one tokenized data set, without .bin or .idx, divided by `split`. Exclusive with `train_data_paths` and
    its kin."""

    use_shared_fs: bool = True
    """The index files beside the data are on storage that all hosts see, so one process of the run builds them. False:
    one process on each host does."""

    train_data_paths: Optional[list] = None
    """Paths of tokenized data sets (without .bin or .idx) to train on, mixed by `train_data_weights`. Train, valid and
    test paths are given all three or not at all, and not together with `data_path`."""

    train_label_data_paths: Optional[list] = None
    """One data set of labels for each entry of `train_data_paths`, aligned token by token; -100 marks tokens without
    loss. Null: the next token is the label everywhere."""

    train_reward_data_paths: Optional[list] = None
    """Rewards per sample, for kto and reinforce. Refused unless null: preference training is not built."""

    test_data_paths: Optional[list] = None
    """Data sets for the test after training; see `train_data_paths`."""

    test_label_data_paths: Optional[list] = None
    """Labels for `test_data_paths`; see `train_label_data_paths`."""

    test_reward_data_paths: Optional[list] = None
    """Rewards for the test data. Refused unless null: preference training is not built."""

    valid_data_paths: Optional[list] = None
    """Data sets for the evaluations during training; see `train_data_paths`."""

    valid_label_data_paths: Optional[list] = None
    """Labels for `valid_data_paths`; see `train_label_data_paths`."""

    valid_reward_data_paths: Optional[list] = None
    """Rewards for the validation data. Refused unless null: preference training is not built."""

    pos_train_data_paths: Optional[list] = None
    """Preferred answers of pairwise training data. Refused unless null: pairwise data are not built."""

    neg_train_data_paths: Optional[list] = None
    """Rejected answers of pairwise training data. Refused unless null: pairwise data are not built."""

    pos_train_label_data_paths: Optional[list] = None
    """Labels of the preferred answers in pairwise training data. Refused unless null: pairwise data are not built."""

    neg_train_label_data_paths: Optional[list] = None
    """Labels of the rejected answers in pairwise training data. Refused unless null: pairwise data are not built."""

    pos_valid_data_paths: Optional[list] = None
    """Preferred answers of pairwise validation data. Refused unless null: pairwise data are not built."""

    neg_valid_data_paths: Optional[list] = None
    """Rejected answers of pairwise validation data. Refused unless null: pairwise data are not built."""

    pos_valid_label_data_paths: Optional[list] = None
    """Labels of the preferred answers in pairwise validation data. Refused unless null: pairwise data are not built."""

    neg_valid_label_data_paths: Optional[list] = None
    """Labels of the rejected answers in pairwise validation data. Refused unless null: pairwise data are not built."""

    pos_test_data_paths: Optional[list] = None
    """Preferred answers of pairwise test data. Refused unless null: pairwise data are not built."""

    neg_test_data_paths: Optional[list] = None
    """Rejected answers of pairwise test data. Refused unless null: pairwise data are not built."""

    pos_test_label_data_paths: Optional[list] = None
    """Labels of the preferred answers in pairwise test data. Refused unless null: pairwise data are not built."""

    neg_test_label_data_paths: Optional[list] = None
    """Labels of the rejected answers in pairwise test data. Refused unless null: pairwise data are not built."""

    train_data_weights: Optional[list] = None
    """Shares of the training data sets in the mixture; normalised, so only ratios count. Null: equal shares, whatever
    their sizes."""

    valid_data_weights: Optional[list] = None
    """Shares of the validation data sets; see `train_data_weights`."""

    test_data_weights: Optional[list] = None
    """Shares of the test data sets; see `train_data_weights`."""

    weight_by_num_documents: bool = False
    """Derive the shares of the data sets from their numbers of documents instead of the given weights; see
    `weighted_sampler_alpha`."""

    weighted_sampler_alpha: float = 1.0
    """With `weight_by_num_documents`: a data set that holds the part p of all documents gets a share proportional to
    p ** alpha x (1 - p), so that small ones are seen more often than their size says, the more so the smaller alpha
    is."""

    data_impl: Literal["infer", "mmap", "cached"] = "infer"
    """File format of the data sets. mmap is the .bin/.idx pair, and infer finds that out; the older format cached is
    refused: not built."""

    pack_impl: Literal["packed", "pack_until_overflow", "unpacked"] = "packed"
    """How documents fill samples. packed: end to end, cut every seq_length tokens. pack_until_overflow: whole documents
    until the next does not fit. unpacked: one document each. The last two fill up with padding that counts for nothing,
    and do not go with `train_epochs`."""

    dataset_impl: Literal["gpt2", "pairwise", "online"] = "gpt2"
    """Kind of samples. gpt2: plain token sequences. pairwise and online are refused: not built."""

    train_impl: Literal["normal", "dpo", "rm", "kto", "reinforce"] = "normal"
    """Training objective. normal: next-token cross entropy. The preference objectives dpo, rm, kto and reinforce are
    refused: not built."""

    dpo_fp32: bool = True
    """Compute dpo's log-probabilities in fp32. Refused unless default: dpo is not built."""

    dpo_reference_free: bool = False
    """dpo without a reference model. Refused unless default: dpo is not built."""

    dpo_beta: float = 0.1
    """Strength of dpo's pull towards the reference model. Refused unless default: dpo is not built."""

    kto_fp32: bool = True
    """Compute kto's log-probabilities in fp32. Refused unless default: kto is not built."""

    kto_desirable_weight: float = 1.0
    """Weight of desirable samples in kto. Refused unless default: kto is not built."""

    kto_undesirable_weight: float = 1.0
    """Weight of undesirable samples in kto. Refused unless default: kto is not built."""

    z_loss: float = 0.0
    """Weight of the squared scores in the reward model's loss. Refused unless default: reward models are not built."""

    kto_beta: float = 0.1
    """Strength of kto's pull towards the reference model. Refused unless default: kto is not built."""

    fp32_reinforce: bool = True
    """Compute reinforce's log-probabilities in fp32. Refused unless default: reinforce is not built."""

    kl_impl: Literal["abs", "mse", "kl", "full"] = "mse"
    """Estimator of reinforce's distance from the reference model. Refused unless default: reinforce is not built."""

    kl_div_beta: float = 0.1
    """Weight of that distance. Refused unless default: reinforce is not built."""

    reinforce_leave_one_out: bool = False
    """Subtract the mean reward of a prompt's other answers. Refused unless default: reinforce is not built."""

    fused_loss_chunk: Optional[int] = None
    """Compute output layer and loss together, for this many tokens at a time, so that the logits of a whole micro batch
    never exist; 512 is a good size. Null: the logits of all tokens first, then the loss. Losses and gradients are equal
    but for rounding. Generation and evaluation tasks are not affected. Not with `fp16_lm_cross_entropy` or
    `te_columnparallel`."""

    allow_chopped: bool = True
    """Use documents longer than a sample, cut at its end, when `pack_impl` keeps documents whole; false leaves them
    out. packed cuts documents in any case."""

    mmap_warmup: bool = False
    """Read data files once from end to end at start, so that they are in the page cache. Costs time at start; no effect
    on what is read."""

    save: Optional[str] = None
    """Folder for checkpoints; needs `checkpoint_factor` or `extra_save_iters`. Null: none are written."""

    s3_path: Optional[str] = None
    """Bucket to which checkpoints are uploaded. Refused unless null: not built."""

    s3_chunk_size: int = 104857600
    """Bytes per part of such an upload. Refused unless default: not built."""

    config_files: Optional[dict] = None
    """Names and full text of the configuration files, kept so that a checkpoint can hold them. Filled in when files are
    loaded."""

    load: Optional[str] = None
    """Folder of checkpoints to continue from. Null or without a checkpoint: training starts from fresh weights, unless
    `iteration` asks for a certain one."""

    checkpoint_validation_with_forward_pass: bool = False
    """Store logits in a checkpoint and compare them after loading. Refused unless false: not built."""

    checkpoint_scale: Literal["linear", "log"] = "linear"
    """How `checkpoint_factor` counts. linear: save at its multiples. log: save at its powers, rounded down."""

    checkpoint_factor: Optional[Union[int, float]] = None
    """Iterations between checkpoints, or the base of the powers; see `checkpoint_scale`. Null: only `extra_save_iters`.
    """

    extra_save_iters: Optional[list] = None
    """Further iterations at which a checkpoint is saved; 0 is the untrained model."""

    no_save_optim: bool = False
    """Leave optimizer states out of checkpoints. Smaller, but training cannot be resumed exactly from them."""

    no_save_rng: bool = False
    """Leave the random generators' states out of checkpoints. Dropout then differs after resuming."""

    no_load_optim: bool = False
    """Load the weights, the random generators and the iteration, but start the optimizer and the schedule afresh."""

    no_load_rng: bool = False
    """Do not restore the random generators on loading."""

    finetune: bool = False
    """Load only the weights and start counting at iteration 0, without optimizer, schedule or random states."""

    batch_size: Optional[int] = None
    """Copy of `train_micro_batch_size_per_gpu`."""

    train_iters: Optional[int] = None
    """Number of optimizer steps to train. Exclusive with `train_epochs`."""

    train_epochs: Optional[int] = None
    """Passes over the training data, from which the number of steps then follows; exclusive with `train_iters`. Goes
    with neither `weight_by_num_documents` nor unequal `train_data_weights`."""

    eval_iters: int = 100
    """Batches per evaluation, each of the size of a training batch. 0: no evaluation."""

    keep_last_n_checkpoints: Optional[int] = None
    """Delete all but the newest so many checkpoints after a save. Null: keep all."""

    eval_interval: int = 1000
    """Training iterations between evaluations on the validation data."""

    split: str = "969, 30, 1"
    """Shares of train, validation and test documents of `data_path`, separated by commas or slashes; normalised, in the
    order of the file."""

    vocab_file: Optional[str] = None
    """The tokenizer's vocabulary: a file, folder or name, see `tokenizer_type`."""

    merge_file: Optional[str] = None
    """Merge rules for GPT2BPETokenizer."""

    num_workers: int = 2
    """Processes that load data, per training process and data set. 0: load in the training process."""

    exit_interval: Optional[int] = None
    """Save a checkpoint and stop when the iteration is a multiple of this, e.g. for time-limited jobs. Null: never."""

    attention_dropout: float = 0.0
    """Probability of dropping an attention weight in training. Only during training."""

    hidden_dropout: float = 0.0
    """Probability of dropping elements of the embedding and of every residual branch. Only during training."""

    weight_decay: float = 0.1
    """Weight decay of all parameters except biases and those of norms, applied apart from the gradient (AdamW) by the
    Adam optimizers. sm3 has none. 0: none."""

    compile: Literal[True, False, "auto"] = False
    """Compile with torch.compile: the norms, rotations and gates of the transformer layers in training, and with true
    also generation. The first step takes 10 to 40 s more, or less in a later run, because
    the work is cached on disk. The numbers are the uncompiled ones up to rounding. On a CPU it needs a C++ compiler.
    auto: on a CPU that has one, for runs of at least 1000 iterations; not on a GPU, where it has not been tried. true
    does not go with te_*."""

    checkpoint_activations: bool = False
    """Keep only the inputs of every `checkpoint_num_layers` layers and recompute the rest in the backward pass: less
    memory, about a third more computation, the same gradients."""

    checkpoint_num_layers: int = 1
    """Layers between kept activations when `checkpoint_activations` is true."""

    deepspeed_activation_checkpointing: bool = True
    """Use DeepSpeed's activation checkpointing. Only true is accepted."""

    contiguous_checkpointing: bool = False
    """Copy kept activations into one buffer against fragmentation. Needs `partition_activations`."""

    checkpoint_in_cpu: bool = False
    """Move kept activations to the CPU's memory. Needs `partition_activations`."""

    synchronize_each_layer: bool = False
    """Wait for the device around every checkpointed block, for timing and debugging."""

    profile_backward: bool = False
    """Log the forward and backward time of every checkpointed block."""

    partition_activations: bool = False
    """Split kept activations over tensor-parallel ranks and gather them in the backward pass: less memory for more
    communication."""

    clip_grad: float = 1.0
    """Copy of `gradient_clipping`."""

    hysteresis: int = 2
    """Overflows tolerated before the fp16 loss scale falls. Refused unless default, because it would be ignored here as
    in GPT-NeoX; set `hysteresis` in the `fp16` block."""

    dynamic_loss_scale: Optional[bool] = None
    """True as long as `loss_scale` is null."""

    loss_scale: Optional[float] = None
    """Fixed fp16 loss scale. Refused unless null, because it would be ignored here as in GPT-NeoX; set `loss_scale` in
    the `fp16` block."""

    loss_scale_window: float = 1000.0
    """Steps without overflow before the fp16 loss scale rises. Refused unless default, because it would be ignored here
    as in GPT-NeoX; set `loss_scale_window` in the `fp16` block."""

    min_scale: float = 1.0
    """Smallest fp16 loss scale. Refused unless default, because it would be ignored here as in GPT-NeoX; set
    `min_loss_scale` in the `fp16` block."""

    char_level_ppl: bool = False
    """Report perplexity per character beside perplexity per token in evaluations, which makes tokenizers comparable.
    Detokenizes the batches, so it is slow."""

    use_mup: bool = False
    """Scale initialisation, learning rates and attention with width (maximal update parametrisation). Refused unless
    false: not built."""

    coord_check: bool = False
    """Plot activations over widths to check muP. Refused unless false: not built."""

    save_base_shapes: bool = False
    """Write the shapes of muP's base model. Refused unless false: not built."""

    base_shapes_file: Optional[str] = None
    """File of muP's base shapes. Refused unless null: not built."""

    mup_init_scale: float = 1.0
    """muP's factor on initial weights. Refused unless default: not built."""

    mup_attn_temp: float = 1.0
    """muP's factor on attention scores. Refused unless default: not built; see `softmax_scale`."""

    mup_output_temp: float = 1.0
    """muP's factor on logits. Refused unless default: not built."""

    mup_embedding_mult: float = 1.0
    """muP's factor on word embeddings. Refused unless default: not built."""

    mup_rp_embedding_mult: float = 1.0
    """muP's factor on position embeddings. Refused unless default: not built."""

    mup_width_scale: int = 2
    """Ratio of widths between muP's base and delta models. Refused unless default: not built."""
