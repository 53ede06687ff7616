"""A tiny Qwen3 of transformers', with a tokenizer, and its twin of ours; texts for them; tasks in local files."""

import json
from pathlib import Path
from typing import Any, Dict

import torch
import transformers
import yaml
from torch import nn

from megatron.model.gpt2_model import build_model
from megatron.neox_arguments import NeoXArgs
from megatron.text_generation import InferenceRunner
from tests.helpers.configs import tiny_values
from tests.helpers.convert_models import hf_config, hf_model
from tests.helpers.hf_models import Family, our_tensors
from tests.helpers.resharding import write_checkpoint

TOKENIZER = Path(__file__).resolve().parents[1] / "golden" / "data_index" / "tiny_tokenizer.json"
"""Byte-level BPE, 300 tokens, <|endoftext|> = 0."""
VOCAB, CONTEXT, EOD = 300, 48, 0
WIDTHS = dict(hidden_size=80, num_attention_heads=6, num_key_value_heads=2, head_dim=24, intermediate_size=46)
NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}

TEXT = (
    "The court of the village met on the first day of March. Nobody knew why the north wall had been whitened, nor "
    "who had paid for it; but the mayor, a careful man, had written down every name. \N{EURO SIGN}40 were missing.\n"
    "\tAfter an hour they left, one by one, without a word, and the snow began again.  No one came back.\n"
) * 2


def hf_twin(layers: int = 2) -> nn.Module:
    """The model of transformers', random, in fp32."""
    config = hf_config(
        "qwen3",
        **WIDTHS,
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=EOD,
    )
    return hf_model(config)


def twin_values(**overrides: Any) -> Dict[str, Any]:
    """Our settings of it. The vocabulary is padded to 384."""
    return tiny_values(
        **{
            **{name: WIDTHS[name] for name in ("hidden_size", "num_attention_heads", "head_dim")},
            **dict(num_kv_heads=2, ffn_hidden_size=WIDTHS["intermediate_size"], qk_norm_type="per_head"),
            **dict(norm="rmsnorm", rms_norm_epsilon=1e-6, activation="swiglu", no_weight_tying=True),
            **dict(use_bias_in_attn_linear=False, use_bias_in_mlp=False, padded_vocab_size=384),
            **dict(seq_length=CONTEXT, max_position_embeddings=CONTEXT),
            **dict(tokenizer_type="HFTokenizer", vocab_file=str(TOKENIZER)),
            **overrides,
        }
    )


def twin_args(**overrides: Any) -> NeoXArgs:
    """The arguments of twin_values, with the tokenizer."""
    args = NeoXArgs.from_dict(twin_values(**overrides))
    args.build_tokenizer()
    return args


def twin_weights(hf: nn.Module) -> Dict[str, torch.Tensor]:
    """Our whole tensors; the rows that only pad the vocabulary would win every argmax if they were looked at."""
    family = Family(hf, dict(num_layers=hf.config.num_hidden_layers, no_weight_tying=True), NORMS, ())
    tensors = our_tensors(family, dict(hf.named_parameters()))
    padding = torch.full((384 - VOCAB, WIDTHS["hidden_size"]), 3.0)
    padding[::2] = -3.0
    return {
        name: torch.cat([tensor.detach(), padding]) if tensor.shape[0] == VOCAB else tensor.detach()
        for name, tensor in tensors.items()
    }


def twin_runner(args: NeoXArgs, hf: nn.Module) -> InferenceRunner:
    """Our model of it in one process."""
    model = build_model(args)
    model.load_state_dict(twin_weights(hf), strict=True)
    return InferenceRunner(args, model)


def save_twin(folder: Path, hf: nn.Module) -> None:
    """A checkpoint of it."""
    layers: Dict[int, Dict[str, torch.Tensor]] = {}
    for name, tensor in twin_weights(hf).items():
        _, index, rest = name.split(".", 2)
        layers.setdefault(int(index), {})[rest] = tensor
    write_checkpoint(folder, layers, twin_values(), vocab=384)


def save_hf_twin(folder: Path, hf: nn.Module) -> None:
    """The folder that from_pretrained reads."""
    hf.save_pretrained(folder)
    hf_tokenizer().save_pretrained(folder)


def hf_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """The same tokenizer as transformers has it."""
    special = dict(eos_token="<|endoftext|>", pad_token="<|padding|>")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), **special)


_QUESTIONS = [
    ("The mayor was a careful", [" man", " wall", " March"], 0),
    ("Nobody knew why the", [" snow began", " north wall had been whitened", " day"], 1),
    ("Then,\n", ["after an hour", "they left, one by one", "who had paid for it"], 2),
    ("It is " + "very " * 40 + "cold", [" today", "er than ever", "."], 1),
    ("No one came", [" back", " again ", ""], 0),
]


def write_tasks(folder: Path, hf: nn.Module) -> None:
    """Four tasks in YAML with JSON lines beside them: one of each kind of request, two of generation.

    The answers of the generation task are the model's own for every other question, so its score is one half.
    """
    folder.mkdir()
    choices = [{"question": q, "choices": [c or "!" for c in cs], "answer": a} for q, cs, a in _QUESTIONS]
    texts = [{"text": TEXT[: size * 37]} for size in (1, 3, 12)]
    contexts = [question[:60] for question, _, _ in _QUESTIONS]
    answers = [{"question": q, "answer": greedy(hf, q, 9) if n % 2 else "no"} for n, q in enumerate(contexts)]
    for name, lines in {"choices": choices, "texts": texts, "answers": answers}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write_task(
        folder,
        "local_choices",
        "choices",
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        target_delimiter="",
        metric_list=[{"metric": name} for name in ("acc", "acc_norm", "brier_score")],
    )
    _write_task(
        folder,
        "local_texts",
        "texts",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    )
    _write_task(
        folder,
        "local_words",
        "choices",
        output_type="loglikelihood",
        doc_to_text="{{question}}",
        doc_to_target="{{choices[1]}}",
        metric_list=[{"metric": name} for name in ("perplexity", "acc")],
    )
    _write_task(
        folder,
        "local_answers",
        "answers",
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": [], "max_gen_toks": 9, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )


def _write_task(folder: Path, name: str, data: str, **task: Any) -> None:
    kwargs = {"data_files": {"test": str(folder / f"{data}.jsonl")}}
    task.update(task=name, dataset_path="json", dataset_kwargs=kwargs, test_split="test")
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def greedy(hf: nn.Module, text: str, maximum: int, until=()) -> str:
    """The likeliest next tokens, one whole forward pass each, until the end-of-text token or a string."""
    tokenizer = hf_tokenizer()
    tokens = tokenizer(text)["input_ids"][-(CONTEXT - maximum) :]
    new = []
    with torch.no_grad():
        while len(new) < maximum:
            new.append(int(hf(torch.tensor([tokens + new])).logits[0, -1].argmax()))
            if new[-1] == EOD:
                break
    generated = tokenizer.decode(new, skip_special_tokens=True)
    for end in until:
        generated = generated.split(end)[0]
    return generated
