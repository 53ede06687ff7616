"""Which Hugging Face model type can hold a model of ours."""

from typing import Dict, List, Optional, Tuple

from megatron.convert.families import FAMILIES, Family
from megatron.errors import ConversionError

_GPT_NEOX_NAMES = {"neox": "gpt_neox"}
"""What GPT-NeoX's converter calls its choices, where that is not the model_type."""

_SHOWN = 4


def family_named(name: str) -> Family:
    """By model_type, class name (LlamaForCausalLM), or GPT-NeoX's name. Raises ConversionError."""
    wanted = _GPT_NEOX_NAMES.get(name.lower(), name)
    for family in FAMILIES.values():
        if wanted.lower() in (family.model_type.lower(), family.architecture.lower()):
            return family
    raise ConversionError(f"architecture={name} is not known; choose one of {', '.join(['neox', *FAMILIES])}, or auto")


def choose_family(neox_args, architecture: Optional[str] = None, preferred: Optional[str] = None) -> Family:
    """The first family that can hold the model, or the one asked for if it can.

    architecture: as for family_named; None or "auto" leaves the choice open. preferred: the model_type to take first.
    Raises ConversionError with the reasons, and with the families that can hold it.
    """
    if architecture is not None and architecture.lower() != "auto":
        return _explicit(family_named(architecture), neox_args)
    refusals: Dict[str, List[str]] = {}
    for name, family in sorted(FAMILIES.items(), key=lambda item: item[0] != preferred):
        refusals[name] = family.refusals(neox_args)
        if not refusals[name]:
            return family
    several = not neox_args.has_uniform_heads

    def distance(name: str) -> Tuple[bool, bool, int]:
        """A Mixtral is none of ours whatever the settings; of layers that differ speaks first who can have them."""
        return name == "mixtral", several and not FAMILIES[name].by_layer, len(refusals[name])

    nearest = sorted(refusals, key=distance)[:_SHOWN]
    reasons = [f"{name}:\n{_listed(refusals[name])}" for name in nearest]
    raise ConversionError("no Hugging Face model known here can hold this one; nearest are\n" + "\n".join(reasons))


def _explicit(family: Family, neox_args) -> Family:
    problems = family.refusals(neox_args)
    if not problems:
        return family
    able = [name for name, other in FAMILIES.items() if other is not family and not other.refusals(neox_args)]
    hint = f"--architecture {able[0]} can hold it" if able else "no other that is known here can hold it either"
    others = f" (also {', '.join(able[1:])})" if able[1:] else ""
    raise ConversionError(f"a {family.architecture} cannot hold this model; {hint}{others}:\n{_listed(problems)}")


def _listed(problems: List[str]) -> str:
    return "\n".join(f"  {problem}" for problem in problems)
