"""What is wrong with head_dim, softmax_scale and qk_norm_type, or with other arguments because of them.

Without these three arguments nothing is checked here that GPT-NeoX would not refuse later.
"""

import math
from typing import List

from megatron.errors import ConfigError
from megatron.head_dim.config import head_geometry

QK_NORM_TYPES = ("joint", "per_head")
WITHOUT_HEADS = ("gmlp", "amlp", "rwkv", "mamba")
"""Kinds of layers (attention_config) whose widths have nothing to do with head_dim."""
DENSE = ("global", "flash")
"""Kinds of attention that can be told a scale. Those of DeepSpeed's sparse attention take head_dim ** -0.5."""
BY_LAYER = (list, dict)
"""How settings are written that have a value for each layer."""
FLASH_MAX_HEAD_DIM = 256
FLASH_HEAD_DIM_MULTIPLE = 8


def check_head_dim(neox_args) -> None:
    """Raises ConfigError with all problems. Called when other arguments are derived, and none are checked yet."""
    problems = head_dim_problems(neox_args)
    if problems:
        raise ConfigError(problems)


def head_dim_problems(neox_args) -> List[str]:
    """One message for each problem: setting=value, what is wrong, what to do."""
    given = (neox_args.head_dim, neox_args.softmax_scale, neox_args.qk_norm_type)
    problems = _type_problems(*given) + _by_layer_problems(neox_args)
    if problems:
        return problems
    if any(value is not None for value in given):
        problems = [*_width_problems(neox_args), *_kind_problems(neox_args), *_norm_problems(neox_args)]
    return problems + _mup_problems(neox_args) + _te_problems(neox_args)


def _by_layer_problems(neox_args) -> List[str]:
    return [
        f"{name}={getattr(neox_args, name)}: widths by layer are not in GPT-NeoX, whose layers all have the same "
        "heads; give one number"
        for name in ("head_dim", "num_kv_heads")
        if isinstance(getattr(neox_args, name), BY_LAYER)
    ]


def _type_problems(head_dim, softmax_scale, qk_norm_type) -> List[str]:
    problems = []
    if head_dim is not None and not isinstance(head_dim, BY_LAYER) and (type(head_dim) is not int or head_dim <= 0):
        problems.append(
            f"head_dim={head_dim!r} must be a positive whole number, the width of one attention head; leave it out for "
            "hidden_size / num_attention_heads"
        )
    if softmax_scale is not None and not _is_positive(softmax_scale):
        hint = "; YAML reads a number like 1e-1 as text, so write 1.0e-1" if isinstance(softmax_scale, str) else ""
        problems.append(
            f"softmax_scale={softmax_scale!r} must be a positive number; leave it out for head_dim ** -0.5{hint}"
        )
    if qk_norm_type is not None and qk_norm_type not in QK_NORM_TYPES:
        problems.append(f"qk_norm_type={qk_norm_type!r} must be {' or '.join(QK_NORM_TYPES)}")
    return problems


def _is_positive(number) -> bool:
    return type(number) in (int, float) and 0 < number < math.inf


def _width_problems(neox_args) -> List[str]:
    """Widths of the model and of a rank. A missing hidden_size or number of heads is reported by GPT-NeoX."""
    if neox_args.hidden_size is None or neox_args.num_attention_heads is None or not _kinds_with_heads(neox_args):
        return []
    if neox_args.head_dim is None and "mamba" in neox_args.attention_config:
        return []  # as without head_dim
    try:
        geometry = head_geometry(neox_args)
    except ConfigError as error:
        return list(error.problems)
    return geometry.shard_problems(neox_args.model_parallel_size)


def _kind_problems(neox_args) -> List[str]:
    with_heads, problems = _kinds_with_heads(neox_args), []
    for name in ("head_dim", "softmax_scale", "qk_norm_type"):
        value = getattr(neox_args, name)
        if value is not None and not with_heads:
            kinds = ", ".join(sorted(set(neox_args.attention_config)))
            problems.append(f"{name}={value}: {kinds} layers (attention_config) have no such heads; remove it")
    width = neox_args.head_dim
    if width is not None and "flash" in with_heads:
        if width > FLASH_MAX_HEAD_DIM or width % FLASH_HEAD_DIM_MULTIPLE:
            problems.append(
                f"head_dim={width}: flash attention takes multiples of {FLASH_HEAD_DIM_MULTIPLE} up to "
                f"{FLASH_MAX_HEAD_DIM}; use another width, or global in attention_config"
            )
    fixed = sorted(set(with_heads) - set(DENSE))
    if neox_args.softmax_scale is not None and fixed:
        problems.append(
            f"softmax_scale={neox_args.softmax_scale}: {', '.join(fixed)} attention scales scores by head_dim ** -0.5, "
            "whatever is asked for; remove it, or use global or flash in attention_config"
        )
    return problems


def _kinds_with_heads(neox_args) -> List[str]:
    return [kind for kind in neox_args.attention_config if kind not in WITHOUT_HEADS]


def _norm_problems(neox_args) -> List[str]:
    if neox_args.use_qk_layernorm and neox_args.qk_norm_type == "per_head":
        return [
            "qk_norm_type=per_head and use_qk_layernorm=True, which means joint, contradict each other; remove "
            "use_qk_layernorm"
        ]
    return []


def _mup_problems(neox_args) -> List[str]:
    if not neox_args.use_mup:
        return []
    return [
        f"{name}={getattr(neox_args, name)} with use_mup=True: muP compares with a model of smaller hidden_size, whose "
        f"heads are narrower too, and scales scores by 1 / head width; remove {name}, or set use_mup: false"
        for name in ("head_dim", "softmax_scale")
        if getattr(neox_args, name) is not None
    ]


def _te_problems(neox_args) -> List[str]:
    if not (getattr(neox_args, "te_mha", False) or getattr(neox_args, "te_fp8_mha", False)):
        return []
    from megatron.head_dim import te_attention  # not in checkouts without te_mha

    return te_attention.problems(neox_args)
