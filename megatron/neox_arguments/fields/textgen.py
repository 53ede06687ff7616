"""Text generation and evaluation."""

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass
class NeoXArgsTextgen:
    """Sampling settings and the files used by generate.py; what eval.py measures."""

    text_gen_type: Optional[str] = None
    """What generate.py does: unconditional, input-file or interactive. Null: input-file when `sample_input_file` is
    set, else unconditional. precompute (log-probabilities of data sets) is refused: not built."""

    precompute_model_name: Optional[str] = None
    """Suffix of data sets with precomputed log-probabilities. Refused unless null: not built."""

    temperature: float = 0.0
    """Logits are divided by this before sampling; below 1 sharpens, above 1 flattens. 0 leaves them as they are; with
    top_k and top_p also 0, the likeliest token is taken each time."""

    top_p: float = 0.0
    """Sample from the smallest set of tokens whose probabilities reach this sum. 0: no limit."""

    top_k: int = 0
    """Sample from this many likeliest tokens. 0: no limit."""

    return_logits: bool = False
    """Put the logits of every generated token into the output records. Large: one number per vocabulary entry and
    token."""

    maximum_tokens: int = 64
    """Most tokens generated for one prompt; the context ends at `seq_length` in any case."""

    prompt_end: str = "\n"
    """Text that separates prompts in an input file and ends a prompt in interactive use."""

    sample_input_file: Optional[str] = None
    """Text file of prompts for input-file generation."""

    sample_output_file: str = "samples.txt"
    """File for generated samples, one JSON object per line. For an input file the default stands for the input's name
    plus `.output.jsonl`."""

    num_samples: int = 1
    """Samples that unconditional generation makes."""

    recompute: bool = False
    """Generate without a key/value cache by running the whole text again for each token. Same result, slower; a check
    on the cache. Refused with `kv_cache_dtype` and `prefill_chunk_size`, which act on the cache."""

    kv_cache_dtype: Optional[Literal["fp8_e4m3", "int8"]] = None
    """Number format of the key/value cache in generation. fp8_e4m3: 8-bit floats, saturating at 448. int8: whole
    numbers from -127 to 127 with one scale in fp32 for each token and head, 4 more bytes. Attention computes in the
    model's precision, and results change by the rounding. Null: the model's."""

    prefill_chunk_size: Optional[int] = None
    """Run a prompt through the model in pieces of at most this many tokens, which bounds the memory for activations and
    scores. Same result. Null: the whole prompt at once."""

    eval_results_prefix: str = ""
    """Start of the name of eval.py's result file, PREFIX_eval_results_DATE.json; it may begin with a folder."""

    eval_tasks: Optional[list] = None
    """Tasks that eval.py runs with lm-evaluation-harness: names of tasks and groups, patterns such as arc_*, and YAML
    files. They need requirements/requirements-eval.txt."""

    eval_task_folder: Optional[str] = None
    """Folder of YAML files with tasks of your own, which `eval_tasks` can name."""

    eval_num_fewshot: Optional[int] = None
    """Examples before each question. Null: each task's own number. A task that fixes 0 keeps it."""

    eval_limit: Optional[int] = None
    """Questions of each task, for a quick look. Null: all."""

    eval_batch_size: Optional[int] = None
    """Texts that eval.py runs through the model together. Null: `train_micro_batch_size_per_gpu`."""

    perplexity_file: Optional[str] = None
    """UTF-8 text of which eval.py measures loss, perplexity and bits per byte (--perplexity FILE). Needs no harness."""

    perplexity_stride: Optional[int] = None
    """Tokens scored in each window after the first over a text longer than the context. Smaller gives each token more
    context, which lowers the loss, and takes longer. Null: the context length, so that windows do not overlap."""
