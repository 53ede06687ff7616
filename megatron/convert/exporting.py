"""A checkpoint of ours, or GPT-NeoX's, becomes a Hugging Face model folder, tensor by tensor."""

import os
from itertools import groupby
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from tqdm import tqdm

from megatron.checkpointing.adapters import MERGE, has_adapters
from megatron.checkpointing.model_settings import checkpoint_folder, config_paths, inference_args
from megatron.checkpointing.reader import CheckpointReader
from megatron.checkpointing.stamp import check_stamp
from megatron.checkpointing.te_names import form_of
from megatron.convert import side_files
from megatron.convert.ahead import Ahead
from megatron.convert.choose import choose_family
from megatron.convert.exported_tokenizer import Vocabulary, known_vocabulary, save_tokenizer
from megatron.convert.families import Family
from megatron.convert.families.rope import with_plain_base
from megatron.convert.hf_writer import MAX_SHARD_BYTES, HFWriter, write_json
from megatron.convert.neox_source import NeoXSource
from megatron.convert.older_config import older_keys
from megatron.convert.outputs import check_new, new_folder
from megatron.convert.precision import DTYPE_NAME, converted, dtype_of, dtype_problems, main_dtype
from megatron.convert.rules import Line, write_out
from megatron.errors import CheckpointError, ConversionError
from megatron.neox_arguments.loading import load_files


class Plan(NamedTuple):
    """All that an export will do, worked out and checked before anything is written."""

    family: Family
    config: Dict[str, Any]
    lines: List[Line]
    source: NeoXSource
    dtypes: Dict[Line, torch.dtype]
    """Of each line's tensors in the files to be written."""
    files: Optional[str]
    """The folder with the model's own Hugging Face files, if it has one."""
    settings: Mapping[str, Any]
    vocabulary: Vocabulary
    notes: List[str]

    def tensors(self) -> List[Tuple[str, Tuple[int, ...], torch.dtype]]:
        """(name, shape, dtype) in the order of writing."""
        return [
            (name, shape, self.dtypes[line])
            for line in self.lines
            for name, shape in zip(line.theirs, line.shapes, strict=True)
        ]


def plan_export(
    checkpoint: str,
    *,
    config_files: Sequence[str] = (),
    architecture: Optional[str] = None,
    precision: str = "auto",
    vocab_size: Optional[int] = None,
    pad_token_id: Optional[int] = None,
    iteration: Optional[int] = None,
    hf_tokenizer: bool = False,
) -> Plan:
    """What `export_hf` would write; reads names and shapes, and no weights. Raises as it does.

    hf_tokenizer: vocab_file is known to be in the folder of a Hugging Face tokenizer; an error if it is not.
    """
    wanted = dtype_of(precision)
    reader = CheckpointReader(checkpoint_folder(checkpoint, iteration))
    _check_native(reader)
    settings = load_files(_configs(reader, config_files))[0]
    kept = {name: settings[name] for name in ("attention_dropout", "hidden_dropout") if name in settings}
    neox_args = inference_args(reader, config_files, changes=kept)
    check_stamp(neox_args, reader.folder)
    _check_merged(neox_args, reader)
    neox_args = with_plain_base(neox_args)
    files = side_files.folder_of(reader.folder, settings, hf_tokenizer)
    vocabulary = known_vocabulary(files, settings, neox_args.padded_vocab_size, vocab_size)
    original = side_files.read_json(files, side_files.CONFIG).get("model_type")
    family = choose_family(neox_args, architecture, preferred=original)
    lines = write_out(family.rules(neox_args), neox_args, vocabulary.size)
    source = NeoXSource(reader, neox_args, lines)
    _check_weights(reader, source, wanted)
    dtypes = {line: wanted or dtype for line, dtype in source.dtypes.items()}
    config = family.config(neox_args, vocabulary.size)
    config.update(vocabulary.special_tokens(pad_token_id), dtype=_config_dtype(dtypes))
    config.update(older_keys(config))
    return Plan(family, config, lines, source, dtypes, files, settings, vocabulary, list(vocabulary.notes))


def _check_merged(neox_args, reader: CheckpointReader) -> None:
    """Raises ConversionError for a model with adapters, which are files of their own there."""
    if neox_args.lora is not None or has_adapters(reader):
        raise ConversionError(
            f"{reader.folder} has adapters (lora): merge them first, {MERGE}, and export what that writes; or write "
            "them for PEFT with tools/ckpts/export_lora.py, beside an export of the base"
        )


def _check_native(reader: CheckpointReader) -> None:
    """Raises ConversionError for weights of Transformer Engine's modules, which have other names and rows."""
    form = form_of(name for index in reader.layer_indices() for name in reader.layer_shapes(index))
    parts = [part for part, is_te in form._asdict().items() if is_te]
    if parts:
        raise ConversionError(
            f"{reader.folder}: its weights are Transformer Engine's ({', '.join(parts)}); convert it first: "
            "python tools/ckpts/convert_te.py IN OUT --to native"
        )


def export_hf(
    checkpoint: str,
    out: str,
    *,
    config_files: Sequence[str] = (),
    architecture: Optional[str] = None,
    precision: str = "auto",
    vocab_size: Optional[int] = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dry_run: bool = False,
    iteration: Optional[int] = None,
    pad_token_id: Optional[int] = None,
    tokenizer: bool = True,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Write a checkpoint as a folder for `from_pretrained`, and return that folder.

    checkpoint: a save folder, of which `iteration` or `latest` is taken, or a global_step<N> folder; in any layout.
    config_files: its YAML files, by default those kept in it. architecture: a model_type, else the first that can hold
    the model. precision: auto (each tensor stays as it is), fp16, bf16 or fp32. vocab_size: the tokens in use; by
    default that of the model it was imported from, or the tokenizer's. tokenizer: whether its files are written.
    dry_run: everything is checked and nothing written.

    Raises ConversionError if no architecture can hold the model, or the one asked for cannot; CheckpointError with
    every tensor that is missing, left over or of another shape; ConfigError. There is then nothing under `out`.
    """
    check_new(os.path.abspath(out))
    plan = plan_export(
        checkpoint,
        config_files=config_files,
        architecture=architecture,
        precision=precision,
        vocab_size=vocab_size,
        pad_token_id=pad_token_id,
        iteration=iteration,
    )
    for note in plan.notes:
        say(note)
    if not dry_run:
        write_export(plan, out, max_shard_bytes, pad_token_id, tokenizer, progress, say)
    return out


def write_export(
    plan: Plan,
    out: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    pad_token_id: Optional[int] = None,
    tokenizer: bool = True,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Carry out a plan; as export_hf."""
    tensors = plan.tensors()
    total = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in tensors)
    bar = tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, desc="weights", disable=not progress)
    with new_folder(out) as unfinished, bar, HFWriter(unfinished, tensors, max_shard_bytes) as writer:
        layers = {index: list(lines) for index, lines in groupby(plan.lines, key=lambda line: line.index)}
        verify = Ahead(plan.source.verify, list(layers))
        for index, lines in layers.items():
            verify(index)
            for line in lines:
                bar.update(_write_line(plan, line, writer))
            plan.source.release()
        write_json(os.path.join(unfinished, side_files.CONFIG), plan.config)
        write_json(os.path.join(unfinished, side_files.GENERATION_CONFIG), _generation_config(plan))
        if tokenizer:
            say(save_tokenizer(plan.files, plan.settings, unfinished, pad_token_id))


def _write_line(plan: Plan, line: Line, writer: HFWriter) -> int:
    """Returns the bytes. Nothing is kept, so that the next parameter is read without this one in memory."""
    parts = line.operation.split(plan.source.read(line), line.widths)
    named = zip(line.theirs, parts, strict=True)
    return sum(writer.write(name, converted(part, plan.dtypes[line], name)) for name, part in named)


def _configs(reader: CheckpointReader, given: Sequence[str]) -> Sequence[str]:
    if given:
        return given
    try:
        return config_paths(reader.folder)
    except CheckpointError:
        raise CheckpointError(f"{reader.folder} holds no configs/; name its YAML files with --config_file") from None


def _check_weights(reader: CheckpointReader, source: NeoXSource, wanted: Optional[torch.dtype]) -> None:
    problems = source.problems()
    problems = problems or dtype_problems(((line.ours, dtype) for line, dtype in source.dtypes.items()), wanted)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{reader.folder} does not hold the model of its config:\n{listed}")


def _config_dtype(dtypes: Mapping[Line, torch.dtype]) -> str:
    sizes = ((dtype, sum(torch.Size(shape).numel() for shape in line.shapes)) for line, dtype in dtypes.items())
    return DTYPE_NAME[main_dtype(sizes)]


def _generation_config(plan: Plan) -> Dict[str, Any]:
    """The source's own if there is one; its special tokens are the config's."""
    original = side_files.read_json(plan.files, side_files.GENERATION_CONFIG)
    tokens = {key: plan.config[key] for key in side_files.SPECIAL_TOKENS if plan.config.get(key) is not None}
    return {"_from_model_config": True, **tokens} if not original else {**tokens, **original}
