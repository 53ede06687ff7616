"""`rope_scaling`: Hugging Face's mapping, checked and given one form."""

import difflib
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

from megatron.errors import ConfigError

_ORIGINAL = "original_max_position_embeddings"
_KEYS: Dict[str, Tuple[Tuple[str, ...], Tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), (_ORIGINAL,)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
    "yarn": (
        ("factor",),
        (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), (_ORIGINAL, "attention_factor", "factor")),
    "proportional": ((), ("factor",)),
}
"""Required and optional keys of each type."""
_ALIASES = {"su": "longrope"}
"""The first Phi-3 models' name for it."""
_OF_ALL_TYPES = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True)
class RopeScaling:
    """A change of the rotary frequencies: Hugging Face's numbers, with its defaults filled in.

    `attention_factor` multiplies cosine and sine; yarn's mscale and mscale_all_dim are already in it. Numbers that
    the type does not have keep the values below and mean nothing.
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: Tuple[float, ...] = ()
    long_factor: Tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0

    def rotated_pairs(self, rotary_ndims: int) -> int:
        """How many pairs of dimensions turn at all: the first ones, which of type proportional is a share of them."""
        return int(self.partial_rotary_factor * rotary_ndims // 2)

    @property
    def length_threshold(self) -> Optional[int]:
        """Frequencies depend on the length of the text once it has more tokens than this; None: they never do."""
        return self.original_max_position_embeddings if self.rope_type in ("dynamic", "longrope") else None


def parse_rope_scaling(
    value: Optional[Mapping[str, Any]],
    rotary_ndims: int,
    max_position_embeddings: int,
    *,
    base: Optional[float] = None,
    rotary_pct: Optional[float] = None,
    name: str = "rope_scaling",
) -> Optional[RopeScaling]:
    """The scaling that a `rope_scaling` mapping describes; None for None and for rope_type default.

    Names, defaults and the spelling `type` for `rope_type` are those of transformers 5 (modeling_rope_utils), whose
    `rope_parameters` may also hold rope_theta and partial_rotary_factor: they must repeat `base` (rotary_emb_base) and
    `rotary_pct`. Of type proportional, partial_rotary_factor is a number of its own. Beyond transformers, dynamic may
    have original_max_position_embeddings (default max_position_embeddings, the only length that it knows for it).
    `name` is what messages call the mapping.

    Raises ConfigError with every problem found.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be a mapping with rope_type and that type's numbers")
    rope_type, problem = _rope_type(value)
    if problem:
        raise ConfigError(f"{name}={dict(value)} {problem}")
    given = {key: entry for key, entry in value.items() if entry is not None or key == "truncate"}
    problems = [
        *_key_problems(rope_type, value, given),
        *(f"{key}={given[key]!r} must be {wanted}" for key, wanted in _wrong_values(given, rotary_ndims)),
        *_repeated_problems(rope_type, given, base, rotary_pct),
    ]
    if not problems:
        problems = [
            *_contradictions(rope_type, given, rotary_ndims, max_position_embeddings, base),
            *(_share_problems(given, rotary_ndims, rotary_pct) if rope_type == "proportional" else ()),
        ]
    if problems:
        raise ConfigError([f"{name} of type {rope_type}: {problem}" for problem in problems])
    return None if rope_type == "default" else _resolve(rope_type, given, max_position_embeddings)


def _rope_type(value: Mapping[str, Any]) -> Tuple[Optional[str], Optional[str]]:
    """(type, None), or (None, what is wrong)."""
    known = ", ".join(_KEYS)
    spelled = [value[key] for key in ("rope_type", "type") if value.get(key) is not None]
    if not spelled:
        if value and set(value) <= set(_OF_ALL_TYPES):  # transformers 5 writes {"rope_theta": ...} for no scaling
            return "default", None
        return None, f"has no rope_type; give one of {known}"
    types = [_ALIASES.get(entry, entry) if isinstance(entry, str) else entry for entry in spelled]
    for rope_type in types:
        if not isinstance(rope_type, str) or rope_type not in _KEYS:
            close = difflib.get_close_matches(str(rope_type), _KEYS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            return None, f"has rope_type {rope_type!r}, which is none of {known}{hint}"
    if len(set(types)) > 1:
        return None, f"has rope_type {spelled[0]!r} and type {spelled[1]!r}; keep rope_type"
    return types[0], None


def _key_problems(rope_type: str, value: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    required, optional = _KEYS[rope_type]
    for key in required:
        # A null factor is yarn's way to ask for the ratio of the lengths.
        if key not in given and not (rope_type == "yarn" and key in value):
            yield f"{key} is missing"
    known = (*required, *optional, *_OF_ALL_TYPES)
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            yield f"{key} is not one of its numbers" + (f"; did you mean {close[0]}?" if close else "; remove it")


def _wrong_values(given: Mapping[str, Any], rotary_ndims: int) -> Iterator[Tuple[str, str]]:
    """(key, what its value must be), for each value of the wrong type or out of its range."""
    for key, entry in given.items():
        if key == "factor" and not (_is_number(entry) and entry >= 1):
            yield key, "a number of at least 1"
        elif key == _ORIGINAL and not (type(entry) is int and entry >= 2):
            yield key, "a whole number of at least 2"
        elif key == "truncate" and not isinstance(entry, bool):
            yield key, "true or false"
        elif key in ("mscale", "mscale_all_dim") and not (_is_number(entry) and entry >= 0):
            yield key, "a number of at least 0"
        elif key in _POSITIVE and not (_is_number(entry) and entry > 0):
            yield key, "a number greater than 0"
        elif key in _LISTS:
            half = rotary_ndims // 2
            if not (isinstance(entry, (list, tuple)) and all(_is_number(each) and each > 0 for each in entry)):
                yield key, f"a list of {half} numbers greater than 0"
            elif len(entry) != half:
                yield key, f"a list of {half} numbers, one for each pair of rotated dimensions; it has {len(entry)}"


_POSITIVE = (
    "attention_factor low_freq_factor high_freq_factor beta_fast beta_slow rope_theta partial_rotary_factor".split()
)


def _is_number(value: Any) -> bool:
    """bool is an int in Python but never a number of a config."""
    return type(value) in (int, float) and math.isfinite(value)


def _repeated_problems(
    rope_type: str, given: Mapping[str, Any], base: Optional[float], rotary_pct: Optional[float]
) -> Iterator[str]:
    settings = [("rope_theta", "rotary_emb_base", base)]
    if rope_type != "proportional":
        settings.append(("partial_rotary_factor", "rotary_pct", rotary_pct))
    for key, setting, wanted in settings:
        if key in given and wanted is not None and _is_number(given[key]) and given[key] != wanted:
            yield f"{key}={given[key]} and {setting}={wanted} are one setting; change {setting} or remove {key}"


def _contradictions(
    rope_type: str, given: Mapping[str, Any], rotary_ndims: int, max_positions: int, base: Optional[float]
) -> Iterator[str]:
    """Numbers that are each possible but not together."""
    if given.get(_ORIGINAL, 0) > max_positions:
        yield (
            f"{_ORIGINAL}={given[_ORIGINAL]} is more than max_position_embeddings={max_positions}, the length after "
            "scaling; raise max_position_embeddings"
        )
    if rope_type == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        yield (
            f"high_freq_factor={given['high_freq_factor']} must be greater than "
            f"low_freq_factor={given['low_freq_factor']}"
        )
    fast, slow = given.get("beta_fast", RopeScaling.beta_fast), given.get("beta_slow", RopeScaling.beta_slow)
    if rope_type == "yarn" and fast < slow:
        yield f"beta_fast={fast} must not be less than beta_slow={slow}"
    if rope_type == "yarn" and base is not None and base <= 1:
        yield f"it needs a rotary_emb_base greater than 1, not {base}"
    if rope_type == "dynamic" and rotary_ndims == 2:
        yield "it changes no frequency of 2 rotated dimensions; raise rotary_pct or use type linear"


def _share_problems(given: Mapping[str, Any], rotary_ndims: int, rotary_pct: Optional[float]) -> Iterator[str]:
    """Of type proportional, which has frequencies for the whole head and zeros among them."""
    share = given.get("partial_rotary_factor", 1.0)
    if rotary_pct not in (None, 1.0):
        yield f"partial_rotary_factor={share} says which share of a head turns; set rotary_pct 1.0, not {rotary_pct}"
    if share > 1:
        yield f"partial_rotary_factor={share} must be at most 1"
    elif int(share * rotary_ndims // 2) == 0:
        yield f"partial_rotary_factor={share} of {rotary_ndims} dimensions turns none; raise it, or use no_rope_layers"


def _resolve(rope_type: str, given: Mapping[str, Any], max_positions: int) -> RopeScaling:
    original = given.get(_ORIGINAL, max_positions)
    factor = float(given.get("factor", max_positions / original))
    numbers = {
        key: float(given[key])
        for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if key in given
    }
    if rope_type == "proportional":
        numbers["partial_rotary_factor"] = float(given.get("partial_rotary_factor", 1.0))
    return RopeScaling(
        rope_type,
        factor,
        0 if rope_type in ("linear", "proportional") else original,
        _attention_factor(rope_type, given, factor, original),
        truncate=given.get("truncate", True),
        **numbers,
        **{key: tuple(float(entry) for entry in given[key]) for key in _LISTS if key in given},
    )


def _attention_factor(rope_type: str, given: Mapping[str, Any], factor: float, original: int) -> float:
    """yarn: Peng et al. 2023, eq. 22, or DeepSeek's quotient of two of these. longrope: as transformers has it."""
    if rope_type not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in given:
        return float(given["attention_factor"])
    if factor <= 1:
        return 1.0
    if rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    numerator, denominator = given.get("mscale"), given.get("mscale_all_dim")
    if numerator and denominator:
        return (0.1 * numerator * math.log(factor) + 1) / (0.1 * denominator * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1
