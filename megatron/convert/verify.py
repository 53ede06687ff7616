"""A Hugging Face folder and a checkpoint here, run in fp32: are they one model, and if not, where do they part?

Both compute the same tokens; hidden states are compared layer by layer, then logits, the loss of a text, and the tokens
that each generates greedily with its key/value cache. The models are in memory one after the other, not together.
"""

from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from megatron.checkpointing.model_settings import checkpoint_folder, inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.weights import load_weights_from
from megatron.convert.transformers_run import load_hf, run_hf
from megatron.errors import ConversionError
from megatron.logging.quiet import quiet_libraries, without_library_prints
from megatron.model.gpt2_model import FIRST_TRANSFORMER_LAYER, GPT2ModelSequential
from megatron.neox_arguments.widths import named_layers
from megatron.text_generation import InferenceRunner, stream_tokens

TOLERANCE = 2e-5
"""Share of the largest value at a place. Two fp32 implementations of one deep model are about 1e-6 apart."""


class Run(NamedTuple):
    """What one model made of the tokens."""

    states: Dict[str, torch.Tensor]
    """By place, in order of computation: hidden states [b, s, h], and `logits` [b, s, v]."""
    generated: torch.Tensor
    """int64 [b, steps]"""
    step_logits: torch.Tensor
    """[steps, b, v], from which each of them was chosen."""


class Place(NamedTuple):
    """How far apart the two are at one place of the model."""

    name: str
    magnitude: float
    """The largest value there in transformers."""
    largest: float
    mean: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """NaN does not."""
        return self.largest <= self.allowed


class Generated(NamedTuple):
    """Both models' greedy continuation of one row."""

    theirs: List[int]
    ours: List[int]
    step: Optional[int]
    """The first at which the tokens differ."""
    margin: float
    """Their logit of their token over that of ours, at that step."""
    allowed: float

    @property
    def agrees(self) -> bool:
        """Equal tokens, or the first that differs was a tie as far as rounding goes."""
        return self.step is None or self.margin <= self.allowed


class Report(NamedTuple):
    """All that was found."""

    places: List[Place]
    generation: Optional[Place]
    """The logits of the generated tokens, as long as those are equal; None if nothing was generated."""
    rows: List[Generated]
    losses: Tuple[float, float]
    """Nats per token, theirs and ours, of predicting each token from those before it."""
    description: str
    """The geometry of our model."""

    @property
    def first_difference(self) -> Optional[Place]:
        """Where the two part; None if they agree at every place."""
        return next((place for place in self.places if not place.agrees), None)

    @property
    def agrees(self) -> bool:
        """Whether the two are the same model."""
        generation = self.generation is None or self.generation.agrees
        return self.first_difference is None and generation and all(row.agrees for row in self.rows)


def verify(
    hf: str,
    neox: str,
    tokens: Callable[[Any], torch.Tensor],
    generate: int = 0,
    tolerance: float = TOLERANCE,
    config_files: Sequence[str] = (),
    iteration: Optional[int] = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compare the model in the folder `hf` with the checkpoint `neox`, of any layout.

    tokens: transformers' config object -> token ids [b, s]. generate: tokens to generate after them, or after as many
    of them as leave room for it. config_files, iteration: as for an export.

    Raises ConversionError if transformers cannot load its folder without guessing, or the two have different sizes;
    CheckpointError and ConfigError for the checkpoint.
    """
    reader = CheckpointReader(checkpoint_folder(neox, iteration))  # found out before minutes are spent
    say(f"loading {hf} with transformers")
    model = load_hf(hf)
    ids, config = tokens(model.config), model.config
    prompt = _prompt(ids, generate, config.max_position_embeddings)
    args = inference_args(reader, config_files, 1, "fp32", max(ids.shape[1], prompt.shape[1] + generate))
    _check_sizes(config, args)
    theirs = Run(*run_hf(model, ids, prompt, generate))
    del model
    say(f"loading {reader.folder}")
    ours = run_ours(args, reader.folder, ids, prompt, generate, config.vocab_size)
    return compared(theirs, ours, ids, tolerance, "; ".join(named_layers(_geometries(args), args.num_layers)))


def _geometries(args: Any) -> Dict[str, List[int]]:
    return {str(geometry): numbers for geometry, numbers in args.layers_by_geometry().items()}


def _prompt(ids: torch.Tensor, generate: int, positions: int) -> torch.Tensor:
    if ids.shape[1] > positions or generate >= positions:
        raise ConversionError(
            f"tokens={ids.shape[1]} generate={generate}: the model has {positions} positions; ask for fewer"
        )
    return ids[:, : positions - generate]


def _check_sizes(config: Any, args: Any) -> None:
    pairs = {
        "num_layers": (config.num_hidden_layers, args.num_layers),
        "hidden_size": (config.hidden_size, args.hidden_size),
    }
    problems = [f"{name}={ours}: the Hugging Face model has {theirs}" for name, (theirs, ours) in pairs.items()]
    problems = [text for text, (theirs, ours) in zip(problems, pairs.values(), strict=True) if theirs != ours]
    if args.padded_vocab_size < config.vocab_size:
        problems.append(f"padded_vocab_size={args.padded_vocab_size}: theirs has vocab_size={config.vocab_size}")
    if problems:
        raise ConversionError("these are different models:\n" + "\n".join(f"  {text}" for text in problems))


@torch.no_grad()
def run_ours(args: Any, folder: str, ids: torch.Tensor, prompt: torch.Tensor, generate: int, vocabulary: int) -> Run:
    """Our model of a checkpoint folder, in this process."""
    quiet_libraries(args)
    with without_library_prints(args):
        model = GPT2ModelSequential(args).eval()
    load_weights_from(args, model, folder)
    states, handles = _watched(model, args.num_layers)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    states["logits"] = model((ids, positions))[..., :vocabulary].float()
    for handle in handles:
        handle.remove()
    return Run(states, *_continued(args, model, prompt, generate, vocabulary))


def _watched(model: nn.Module, num_layers: int) -> Tuple[Dict[str, torch.Tensor], List[Any]]:
    """The hidden states [b, s, h] that the next forward pass leaves, and the hooks' handles."""
    states: Dict[str, torch.Tensor] = {}

    def keep(name: str, hidden: torch.Tensor, sequence_first: bool = True) -> None:
        states[name] = hidden.transpose(0, 1) if sequence_first else hidden

    def attention(name: str) -> Callable:
        def hook(module, inputs, output) -> None:
            hidden, bias = output
            keep(name, hidden if bias is None else hidden + bias)

        return hook

    layers = model.sequential[FIRST_TRANSFORMER_LAYER : FIRST_TRANSFORMER_LAYER + num_layers]
    norm = model.sequential[FIRST_TRANSFORMER_LAYER + num_layers + 1]
    handles = [layers[0].register_forward_pre_hook(lambda module, inputs: keep("embedding", inputs[0]))]
    for number, layer in enumerate(layers):
        handles.append(layer.attention.register_forward_hook(attention(f"layer {number} attention")))
        name = f"layer {number}"
        handles.append(layer.register_forward_hook(lambda module, inputs, output, name=name: keep(name, output)))
    handles.append(norm.register_forward_hook(lambda module, inputs, output: keep("final norm", output, False)))
    return states, handles


def _continued(args: Any, model: nn.Module, prompt: torch.Tensor, steps: int, vocabulary: int):
    """(tokens [b, steps], logits [steps, b, v])"""
    if not steps:
        return torch.empty(len(prompt), 0, dtype=torch.int64), torch.empty(0, len(prompt), vocabulary)
    args.tokenizer = SimpleNamespace(vocab_size=vocabulary)  # the rest of the rows is padding
    args.return_logits = True
    runner, never = InferenceRunner(args, model), -1
    *_, state = stream_tokens(args, runner, prompt.tolist(), eos_token_id=never, maximum_tokens=steps)
    return state.tokens[:, prompt.shape[1] :][:, :steps].clone(), state.logits.float()


def compared(theirs: Run, ours: Run, ids: torch.Tensor, tolerance: float, description: str = "") -> Report:
    """The report of two runs."""
    places = [_place(name, states, ours.states[name], tolerance) for name, states in theirs.states.items()]
    rows = [_generated(theirs, ours, row, tolerance) for row in range(len(ids))] if theirs.generated.numel() else []
    losses = tuple(_loss(run.states["logits"], ids) for run in (theirs, ours))
    return Report(places, _generation(theirs, ours, rows, tolerance), rows, losses, description)


def _place(name: str, theirs: torch.Tensor, ours: torch.Tensor, tolerance: float) -> Place:
    difference = (theirs.double() - ours.double()).abs()
    magnitude = theirs.abs().max().item()
    return Place(name, magnitude, difference.max().item(), difference.mean().item(), tolerance * max(1.0, magnitude))


def _generated(theirs: Run, ours: Run, row: int, tolerance: float) -> Generated:
    theirs_tokens, our_tokens = theirs.generated[row].tolist(), ours.generated[row].tolist()
    step = next((n for n, (a, b) in enumerate(zip(theirs_tokens, our_tokens, strict=True)) if a != b), None)
    if step is None:
        return Generated(theirs_tokens, our_tokens, None, 0.0, 0.0)
    logits = theirs.step_logits[step, row]
    margin = (logits[theirs_tokens[step]] - logits[our_tokens[step]]).item()
    # Each of the two logits may be off by the tolerance.
    allowed = 2 * tolerance * max(1.0, logits.abs().max().item())
    return Generated(theirs_tokens, our_tokens, step, margin, allowed)


def _generation(theirs: Run, ours: Run, rows: List[Generated], tolerance: float) -> Optional[Place]:
    """Up to and with the step at which a row's tokens differ: later ones follow other tokens."""
    if not rows:
        return None
    ends = [len(theirs.step_logits) if row.step is None else row.step + 1 for row in rows]
    pairs = [(theirs.step_logits[:end, n], ours.step_logits[:end, n]) for n, end in enumerate(ends)]
    return _place("generation", torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]), tolerance)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    if ids.shape[1] < 2:
        return float("nan")
    return nn.functional.cross_entropy(logits[:, :-1].double().flatten(0, 1), ids[:, 1:].flatten()).item()
