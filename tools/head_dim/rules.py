"""The rules of thumb of `suggest`, as functions of a model's numbers."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Tuple

from megatron.geometry import HeadGeometry
from megatron.neox_arguments.head_schedule import scheduled_width
from tools.head_dim import published

TASKS = ("general", "long_seq", "fine_grained")
NEAR = 2.0
"""Published models whose hidden_size is within this factor count as of the same size."""
BF16 = 2
"""Bytes of a number."""
EXPONENT, MULTIPLE = 0.3, 8
"""Of the schedule by depth that an article proposes; kernels take multiples of 8."""


@dataclass(frozen=True)
class Question:
    """A model without a head_dim, and the head_dim to look at."""

    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    num_layers: int
    seq_length: int
    rotary_emb_base: float
    head_dim: int

    @property
    def geometry(self) -> HeadGeometry:
        """Raises ConfigError if the heads do not divide."""
        return HeadGeometry.from_config(
            self.hidden_size, self.num_attention_heads, self.num_kv_heads, self.head_dim, 1.0
        )


class Rule(NamedTuple):
    """standing: exact, published, measured or claimed."""

    name: str
    says: str
    standing: str
    source: str


def published_widths(hidden_size: int) -> Counter:
    """head_dim of the published models of about this hidden_size, with how many have it."""
    return Counter(
        model.head_dim
        for model in published.models()
        if model.uniform and hidden_size / NEAR <= model.hidden_size <= hidden_size * NEAR
    )


def suggested_width(hidden_size: int, task: str) -> Tuple[int, str]:
    """A head_dim and why.

    general: the most common one of published models of about this size. long_seq: the next wider one among them up to
    256, fine_grained: the next narrower one; both directions are only claimed to help, see `task_rule`.
    """
    counts = published_widths(hidden_size)
    if not counts:
        return 128, f"no published model has a hidden_size near {hidden_size}; 128 is the most common of all"
    common, times = counts.most_common(1)[0]
    why = f"{times} of {sum(counts.values())} published models with a hidden_size near {hidden_size} have {common}"
    wider = sorted(width for width in counts if common < width <= 256)
    narrower = sorted(width for width in counts if width < common)
    if task == "long_seq" and wider:
        return wider[0], f"{why}; for long_seq the next wider one"
    if task == "fine_grained" and narrower:
        return narrower[-1], f"{why}; for fine_grained the next narrower one"
    return common, why


def all_rules(question: Question) -> List[Rule]:
    """Every rule, for this model."""
    functions = (rank_rule, scale_rule, cache_rule, wavelength_rule, kernel_rule, output_init_rule, lr_rule, depth_rule)
    return [practice_rule(question), *(function(question) for function in functions), task_rule(question)]


def practice_rule(question: Question) -> Rule:
    """What published models of this size have."""
    counts = published_widths(question.hidden_size)
    listed = ", ".join(f"{width} ({times})" for width, times in counts.most_common())
    ratio = question.geometry.query_hidden_size / question.hidden_size
    says = f"head_dim of models of about this size: {listed or 'none'}. Query width / hidden_size here: {ratio:.2f}"
    return Rule("practice", says, "published", "tools/head_dim/data/geometries.json, with a source for each model")


def rank_rule(question: Question) -> Rule:
    """The scores are a product of [seq, d] and [d, seq]: their rank is at most min(seq, d)."""
    rank = min(question.seq_length, question.head_dim)
    says = (
        f"one head's scores have rank {rank} at most, of {question.seq_length} tokens. That heads narrower than the "
        "text cannot give every pattern of attention is proved; that wider heads at fixed hidden_size give a better "
        "loss was measured on BERT-sized models"
    )
    return Rule("rank of the scores", says, "exact", "Bhojanapalli et al. 2020, arXiv:2002.07028, theorem 1")


def scale_rule(question: Question) -> Rule:
    """A product of two vectors of d independent numbers of variance 1 has variance d."""
    usual, mup = question.head_dim**-0.5, 1 / question.head_dim
    says = (
        f"softmax_scale {usual:.4g} = head_dim ** -0.5 keeps scores of independent queries and keys at variance 1; "
        f"{mup:.4g} = 1 / head_dim is muP's choice for queries and keys that are aligned, as trained ones become"
    )
    source = "Vaswani et al. 2017, arXiv:1706.03762, 3.2.1; Yang et al. 2022, arXiv:2203.03466"
    return Rule("score scale", says, "exact", source)


def cache_rule(question: Question) -> Rule:
    """2 · layers · m · d numbers a token."""
    token = 2 * question.num_layers * question.geometry.kv_hidden_size * BF16
    says = (
        f"the KV cache takes {token:,} bytes a token in bf16, {token * question.seq_length / 1e9:.3g} GB for "
        f"{question.seq_length} tokens. It grows with head_dim and with num_kv_heads alike: grouped queries pay for "
        "wider heads"
    )
    return Rule(
        "KV cache", says, "exact", "2 x layers x num_kv_heads x head_dim; Ainslie et al. 2023, arXiv:2305.13245"
    )


def wavelength_rule(question: Question) -> Rule:
    """Pair i turns once in 2 pi · base ** (2 i / r) tokens."""
    longest = longest_wavelength(question.head_dim, question.rotary_emb_base)
    word = "more" if longest > question.seq_length else "fewer"
    says = f"the slowest rotary pair turns once in {longest:,.0f} tokens, {word} than the text's {question.seq_length}"
    return Rule("rotary wavelengths", says, "exact", "Su et al. 2021, arXiv:2104.09864, 3.4.3")


def longest_wavelength(rotary_ndims: int, base: float) -> float:
    """Tokens in which the slowest pair of the rotary embedding turns once."""
    return 2 * math.pi * base ** ((rotary_ndims - 2) / rotary_ndims)


def kernel_rule(question: Question) -> Rule:
    """Widths that kernels take as they are."""
    width = question.head_dim
    parts = ["is a multiple of 8" if width % 8 == 0 else "is padded to a multiple of 8 by flash kernels"]
    parts.append("within 256, which flash kernels on CUDA go up to" if width <= 256 else "beyond 256: no flash on CUDA")
    parts.append("a power of two" if width & (width - 1) == 0 else "no power of two, for which kernels are tuned first")
    says = f"{width} {'; '.join(parts)}. `plan` asks each backend"
    return Rule("kernels", says, "exact", "the kernels' own refusals; flash-attention's README")


def output_init_rule(question: Question) -> Rule:
    """Sum of n·d products instead of hidden_size."""
    ratio = math.sqrt(question.geometry.query_hidden_size / question.hidden_size)
    says = (
        f"with the init methods of GPT-NeoX, whose deviation comes from hidden_size, the output projection's result is "
        f"{ratio:.2f} times as large at the start as with a query width of hidden_size; dividing its deviation by that "
        "takes it back"
    )
    return Rule(
        "init of the output projection", says, "exact", "variance of a sum of num_attention_heads x head_dim terms"
    )


def lr_rule(question: Question) -> Rule:
    """muP: Adam's rate for a matrix goes with 1 / fan-in."""
    ratio = question.hidden_size / question.geometry.query_hidden_size
    says = (
        f"by muP the output projection's rate goes with 1 / query width: {ratio:.2f} times that of a square one. That "
        "the rate of the whole model should go with the square root of head_dim is claimed without a measurement, and "
        "was not seen on small models here (docs/claims.md)"
    )
    return Rule("learning rate", says, "measured", "Yang et al. 2022, arXiv:2203.03466, table 3 (the first part)")


def depth_rule(question: Question) -> Rule:
    """Widths that grow with depth, by the exponent that was proposed."""
    schedule = progressive(question.head_dim, question.num_layers)
    says = (
        "heads that grow wider with depth are proposed without a measurement, and small models here could not decide "
        "it (docs/claims.md); with this width in the middle layer, "
        f"head_dim: {schedule_text(schedule)} gives {scheduled_width(schedule, 0)} in the first layer and "
        f"{scheduled_width(schedule, question.num_layers - 1)} in the last. Gemma 4 has wider heads in its global "
        "layers. `plan --sweep` compares such a schedule with one width"
    )
    return Rule("depth", says, "claimed", "tools/head_dim/data/geometries.json (Gemma 4)")


def progressive(head_dim: int, num_layers: int) -> Dict[str, Any]:
    """The setting of widths that grow with depth to the power of EXPONENT, with `head_dim` in the middle layer."""
    middle = (num_layers + 1) / 2
    base = round(head_dim / middle**EXPONENT)
    return {"schedule": "progressive", "base": base, "exponent": EXPONENT, "multiple_of": MULTIPLE}


def schedule_text(schedule: Dict[str, Any]) -> str:
    """As YAML writes it in one line."""
    return f"{{{', '.join(f'{key}: {value}' for key, value in schedule.items())}}}"


def task_rule(question: Question) -> Rule:
    """What `--task` does."""
    says = (
        "long_seq prefers wider heads, by the rank of the scores, and pays in KV cache; fine_grained prefers more, "
        "narrower heads at the same query width. No measurement that decides between them is known here"
    )
    return Rule("task", says, "claimed", "-")
