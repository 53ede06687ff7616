"""Models of several parts, of which the language model is taken: what of config.json and of the tensors is its own."""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple


class Composite(NamedTuple):
    """text_type: the model_type of the language model by itself, as which it is read. prefix: that of its tensors'
    names, where by itself it has "model.". others: prefixes of the tensors of other parts."""

    text_type: str
    prefix: str
    others: Tuple[str, ...]


COMPOSITES = {
    "gemma4": Composite(
        "gemma4_text",
        "model.language_model.",
        ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    ),
}
"""By model_type."""


def language_model(raw: Mapping[str, Any]) -> Dict[str, Any]:
    """The contents of a config.json as those of the language model by itself; any other config as it is.

    Whether the output layer is tied says the whole, as in transformers.
    """
    composite, text = COMPOSITES.get(raw.get("model_type")), raw.get("text_config")
    if composite is None or not isinstance(text, dict):
        return dict(raw)
    of_whole = {key: raw[key] for key in ("dtype", "torch_dtype", "transformers_version") if key in raw}
    tied = raw.get("tie_word_embeddings", True)
    return {**of_whole, **text, "model_type": composite.text_type, "tie_word_embeddings": tied}


def by_itself(model_type: Optional[str], names: List[str]) -> Tuple[Dict[str, str], List[str]]:
    """Of a model's tensors: {name in the files: name in the language model by itself}, and those of other parts."""
    composite = COMPOSITES.get(model_type)
    if composite is None:
        return {name: name for name in names}, []
    others = [name for name in names if name.startswith(composite.others)]
    kept = [name for name in names if not name.startswith(composite.others)]
    return {name: name.replace(composite.prefix, "model.", 1) for name in kept}, others
