"""A model of transformers' in fp32: loaded only if its folder says everything, run with its hidden states kept."""

from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import nn

from megatron.convert.families.composite import COMPOSITES
from megatron.errors import ConversionError

_SHOWN = 8


def load_hf(folder: str) -> nn.Module:
    """AutoModelForCausalLM of a folder on this machine, fp32, evaluating. Of several parts it is the language model.

    Raises ConversionError if transformers is not installed or refuses the folder, or if it would make up weights that
    are missing or ignore some that are there.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConversionError(f"the package {error.name} is not installed; pip install transformers") from None
    bars = transformers.utils.logging
    bars.disable_progress_bar()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        )
    except Exception as error:  # of transformers, safetensors, huggingface_hub: validation, files, names
        raise ConversionError(f"{folder}: transformers cannot load it: {error}") from None
    finally:
        bars.enable_progress_bar()
    problems = [f"{kind}: {_listed(names)}" for kind, names in sorted(report.items()) if names]
    if problems:
        raise ConversionError(f"{folder}: its tensors are not those of its config:\n" + "\n".join(problems))
    return _language_model(model, transformers).eval()


def _language_model(model: nn.Module, transformers: Any) -> nn.Module:
    """The language model by itself, with the weights of the whole."""
    if model.config.model_type not in COMPOSITES:
        return model
    with torch.device("meta"):
        text = transformers.AutoModelForCausalLM.from_config(model.config.text_config)
    text.model, text.lm_head = model.model.language_model, model.lm_head
    return text


def _listed(names: Any) -> str:
    texts = sorted(map(str, names))
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


@torch.no_grad()
def run_hf(
    model: nn.Module, ids: torch.Tensor, prompt: torch.Tensor, generate: int
) -> Tuple[Dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Hidden states and logits of ids [b, s] by place, then `generate` greedy tokens [b, steps] after the prompt with
    the key/value cache, and the logits [steps, b, v] that they were chosen from."""
    states, handles = _watched(model)
    states["logits"] = model(input_ids=ids, use_cache=False).logits.float()
    for handle in handles:
        handle.remove()
    if not generate:
        return states, ids.new_empty(len(ids), 0), states["logits"].new_empty(0, len(ids), model.config.vocab_size)
    return states, *_generated(model, prompt, generate)


def _generated(model: nn.Module, prompt: torch.Tensor, steps: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """By the library's own loop, without what the folder's generation_config adds to it, such as an end token."""
    from transformers import GenerationConfig

    plain = GenerationConfig(
        do_sample=False, max_new_tokens=steps, use_cache=True, return_dict_in_generate=True, output_logits=True
    )
    model.generation_config = plain  # or its values would take the place of those that are None
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=plain)
    return output.sequences[:, prompt.shape[1] :], torch.stack(output.logits).float()


def _watched(model: nn.Module) -> Tuple[Dict[str, torch.Tensor], List[Any]]:
    """The hidden states [b, s, h] that the next forward pass leaves, and the hooks' handles."""
    states: Dict[str, torch.Tensor] = {}

    def keep_input(name: str) -> Callable:
        def hook(module, args, kwargs) -> None:
            states[name] = args[0] if args else kwargs["hidden_states"]

        return hook

    def keep_output(name: str) -> Callable:
        def hook(module, args, output) -> None:
            states[name] = output[0] if isinstance(output, tuple) else output

        return hook

    layers = model.base_model.layers
    handles = [layers[0].register_forward_pre_hook(keep_input("embedding"), with_kwargs=True)]
    for number, layer in enumerate(layers):
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attention
        handles.append(attention.register_forward_hook(keep_output(f"layer {number} attention")))
        handles.append(layer.register_forward_hook(keep_output(f"layer {number}")))
    head = model.get_output_embeddings()
    handles.append(head.register_forward_pre_hook(keep_input("final norm"), with_kwargs=True))
    return states, handles
