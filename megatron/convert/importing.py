"""A Hugging Face model folder becomes a checkpoint in GPT-NeoX's format, tensor by tensor.

OUT/latest, OUT/global_step<N>/    the checkpoint, as training writes it, without an optimizer's state
OUT/model.yml                      the config to load it with
OUT/huggingface/                   the source's tokenizer, config.json and generation_config.json
"""

import os
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from megatron.checkpointing.folders import refuse_patterns
from megatron.checkpointing.reader import LayerState
from megatron.checkpointing.reshard import write_resharded
from megatron.checkpointing.save import ARGS_KEYS
from megatron.checkpointing.shards import Shards
from megatron.convert import side_files
from megatron.convert.ahead import Ahead
from megatron.convert.families import FAMILIES, Family
from megatron.convert.families.config_file import config_problems
from megatron.convert.hf_source import HFSource
from megatron.convert.hf_writer import write_json, write_text
from megatron.convert.imported_tokenizer import tokenizer_settings
from megatron.convert.leftovers import check_source
from megatron.convert.memory import give_back
from megatron.convert.model_args import arguments_of
from megatron.convert.neox_source import whole_on_meta
from megatron.convert.outputs import check_new, new_folder
from megatron.convert.precision import PRECISION, converted, dtype_of, main_dtype
from megatron.convert.rules import Line, write_out
from megatron.convert.yaml_text import yaml_lines
from megatron.errors import ConversionError
from megatron.geometry import padded_vocab_size

CONFIG_NAME = "model.yml"


def import_hf(
    source_folder: str,
    out: str,
    *,
    model_parallel_size: int = 1,
    pipe_parallel_size: int = 0,
    precision: str = "auto",
    make_vocab_size_divisible_by: int = 128,
    iteration: int = 0,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Write the model in `source_folder` as the checkpoint OUT/global_step<iteration>, and return that folder.

    model_parallel_size, pipe_parallel_size: of the run that will load it; pipe_parallel_size 0 makes sequential
    `mp_rank` files, more makes layer files. precision: auto (each tensor stays as it is), fp16, bf16 or fp32.
    say: called with each thing worth knowing, e.g. tensors left out.

    Each tensor of the source is used exactly once. Raises ConversionError with every missing, leftover or differently
    shaped one, or if no model here is the source's; ConfigError if it does not split so; CheckpointError if the files
    cannot be written. There is then nothing under `out` that was not there before.
    """
    refuse_patterns("OUT", out)
    check_new(os.path.abspath(out))
    source = HFSource(source_folder)
    family = family_of(source)
    settings = family.settings(source.config)
    vocabulary = source.config.vocab_size
    settings["model_parallel_size"] = model_parallel_size
    settings["pipe_parallel_size"] = pipe_parallel_size
    settings["make_vocab_size_divisible_by"] = make_vocab_size_divisible_by
    settings["padded_vocab_size"] = padded_vocab_size(vocabulary, make_vocab_size_divisible_by, model_parallel_size)
    neox_args = arguments_of(settings)
    lines = write_out(family.rules(neox_args), neox_args, vocabulary)
    dtype = dtype_of(precision)
    for note in check_source(source, family, neox_args, lines, dtype):
        say(note)
    weights = _HFWeights(source, neox_args, lines, dtype, iteration)
    settings["precision"] = PRECISION[weights.main_dtype]
    kept_in = os.path.join(os.path.abspath(out), side_files.FOLDER)
    tokenizer, notes = tokenizer_settings(source.folder, kept_in)
    for note in notes:
        say(note)
    settings.update(tokenizer)
    text = _yaml_text(settings, source.folder, out, notes)
    neox_args.tokenizer_type = settings["tokenizer_type"]
    with new_folder(out) as unfinished:
        folder = write_resharded(weights, neox_args, unfinished, pipe_parallel_size, {CONFIG_NAME: text}, progress)
        kept = os.path.join(unfinished, side_files.FOLDER)
        os.mkdir(kept)
        names = (side_files.CONFIG, side_files.GENERATION_CONFIG, *side_files.TOKENIZER_FILES)
        side_files.copy_files(names, source.folder, kept)
        if source.other_parts:
            write_json(os.path.join(kept, side_files.CONFIG), source.raw_config)
        write_text(os.path.join(unfinished, CONFIG_NAME), text)
    return os.path.join(out, os.path.basename(folder))


def family_of(source: HFSource) -> Family:
    """By the config's model_type. Raises ConversionError for one that is not known here, or is of another kind."""
    problems = config_problems(source.raw_config)
    if problems:
        raise ConversionError(f"{source.folder}:\n" + "\n".join(problems))
    return FAMILIES[source.raw_config["model_type"]]


class _HFWeights:
    """A source as write_resharded reads it: our parameters, split over the ranks."""

    def __init__(
        self, source: HFSource, neox_args, lines: Sequence[Line], dtype: Optional[torch.dtype], iteration: int
    ):
        self.folder = source.folder
        self.model_parallel_size = neox_args.model_parallel_size
        self.vocabulary_rows = neox_args.padded_vocab_size
        self.iteration = iteration
        self.main_dtype = dtype or _main_dtype(source, lines)
        self._source = source
        self._neox_args = neox_args
        self._shards = Shards(neox_args, empty=source.buffers.empty)
        self._dtype = dtype
        self._lines: Dict[int, List[Line]] = {}
        for line in lines:
            self._lines.setdefault(line.index, []).append(line)
        ranks = range(self.model_parallel_size)
        self._state = Ahead(self._split_layer, [(index, rank) for index in self.layer_indices() for rank in ranks])
        self._whole: LayerState = {}
        self._whole_index: Optional[int] = None

    @property
    def nbytes(self) -> int:
        """On all ranks together."""
        ranks, itemsize = self.model_parallel_size, self.main_dtype.itemsize
        wholes = {(index, line.ours): whole_on_meta(line) for index, lines in self._lines.items() for line in lines}
        pieces = (self._shards.split(*key, whole, ranks) for key, whole in wholes.items())
        return sum(piece.numel() * itemsize for shares in pieces for piece in shares)

    def layer_indices(self) -> List[int]:
        """The layers that have weights, ascending."""
        return sorted(self._lines)

    def layer_state(self, index: int, tp_rank: int) -> LayerState:
        """{name: tensor} of one layer on one rank. In memory are this one, the next one, and the layer of that."""
        return self._state((index, tp_rank))

    def verify_layer(self, index: int) -> None:
        """Hugging Face's files have no checksums."""

    def records(self, mp_rank: int) -> Dict[str, Any]:
        """The settings that GPT-NeoX compares."""
        return {"args": {key: getattr(self._neox_args, key) for key in ARGS_KEYS}}

    def _split_layer(self, item: Tuple[int, int]) -> LayerState:
        index, rank = item
        if self._whole_index != index:
            self._whole = {}  # one layer, not the last as well
            give_back()
            self._whole, self._whole_index = {line.ours: self._merged(line) for line in self._lines[index]}, index
        ranks = self.model_parallel_size
        return {name: self._shards.piece(index, name, whole, rank, ranks) for name, whole in self._whole.items()}

    def _merged(self, line: Line) -> torch.Tensor:
        tensors = self._source.read_all(line.theirs, line.operation.rows_added(line.widths))
        whole = line.operation.merge(tensors, line.widths)
        dtype = self._dtype if line.theirs else self.main_dtype
        return converted(whole, dtype, line.ours)


def _main_dtype(source: HFSource, lines: Sequence[Line]) -> torch.dtype:
    names = (name for line in lines for name in line.theirs)
    return main_dtype((source.dtype(name), torch.Size(source.shape(name)).numel()) for name in names)


def _yaml_text(settings: Mapping[str, Any], source: str, out: str, tokenizer_notes: Sequence[str]) -> str:
    """A config that generates and evaluates as it is, and trains once it is told on what."""
    run = {"train_micro_batch_size_per_gpu": 1, "load": os.path.abspath(out), "finetune": True}
    notes = "".join(f"# The tokenizer: {note}\n" for note in tokenizer_notes)
    return (
        f"# Imported from {os.path.basename(os.path.abspath(source))}. The rows of the embedding are given as\n"
        "# padded_vocab_size, because the model may have more of them than its tokenizer has tokens.\n"
        f"{yaml_lines(settings)}{notes}\n"
        "# Only the weights are loaded, at iteration 0 (finetune). To train, add data_path, an optimizer,\n"
        "# train_iters, lr_decay_style and save.\n"
        f"{yaml_lines(run)}"
    )
