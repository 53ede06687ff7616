"""The ways generate.py makes texts: from a list of prompts, from a file, from nothing, and interactively."""

import time
from collections import Counter
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from megatron.errors import ConfigError, DataError
from megatron.text_generation.collective import from_rank_0, from_rank_0_when_ready
from megatron.text_generation.console import LiveText, show, show_record, show_summary
from megatron.text_generation.prompts import ask_prompt, read_prompts, tokenize_prompt
from megatron.text_generation.records import JSONLinesFile, decode, make_records
from megatron.text_generation.runner import InferenceRunner
from megatron.text_generation.sampling import seeded_generator
from megatron.text_generation.stream import StopTokens, StreamState, end_of_generation, stream_tokens

Record = Dict[str, Any]


def generate_samples_from_prompt(
    neox_args,
    model,
    text: Union[str, List[str]],
    eos_token_id: Optional[int] = None,
    maximum_tokens: Optional[int] = 64,
    recompute: bool = False,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 0.0,
    stop_tokens: StopTokens = None,
    on_record: Optional[Callable[[Record], None]] = None,
) -> List[Record]:
    """Continue each prompt of `text` and return one record per prompt, on every rank.

    Each prompt is a batch of its own and gives what it gives alone, sampling included: the random stream depends on
    neox_args.seed and on how often the same prompt came before. `on_record` is called after each text. The options
    are those of `stream_tokens`; the records are described at `records.make_records`.

    Raises DataError, before anything is generated, for a prompt that leaves no room in the context.
    """
    texts = [text] if isinstance(text, str) else list(text)
    eos = neox_args.tokenizer.eod if eos_token_id is None else eos_token_id
    runner = InferenceRunner.of(neox_args, model)
    prompts = from_rank_0(lambda: [(prompt, tokenize_prompt(neox_args, prompt, eos)) for prompt in texts])
    if not recompute:
        longest = max((len(tokens) for _, tokens in prompts), default=1)
        runner.start(1, end_of_generation(neox_args, longest, maximum_tokens) - 1)  # one cache for all prompts
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, stop_tokens=stop_tokens)
    options.update(eos_token_id=eos, maximum_tokens=maximum_tokens, recompute=recompute)
    records, seen = [], Counter()
    for prompt, tokens in prompts:
        record = _complete(neox_args, runner, prompt, tokens, seen[prompt], options)
        seen[prompt] += 1
        records.append(record)
        if on_record is not None:
            on_record(record)
    return records


def generate_samples_input_from_file(
    neox_args,
    model,
    input_file: Optional[str],
    output_file: Optional[str] = None,
    eos_token_id: Optional[int] = None,
    maximum_tokens: Optional[int] = 64,
    prompt_end: str = "\n",
    **options,
) -> List[Record]:
    """Continue each prompt of a text file (see `prompts.read_prompts`) and write the records as JSON lines.

    output_file defaults to input_file + ".output.jsonl". `options` are those of `generate_samples_from_prompt`.
    """
    prompts = from_rank_0(lambda: read_prompts(input_file, prompt_end))
    output_file = output_file or f"{input_file}.output.jsonl"
    options.update(eos_token_id=eos_token_id, maximum_tokens=maximum_tokens)
    return _generate_to_file(neox_args, model, prompts, output_file, options)


def generate_samples_unconditional(
    neox_args,
    model,
    number_of_samples: int = 10,
    output_file: Optional[str] = None,
    eos_token_id: Optional[int] = None,
    maximum_tokens: Optional[int] = 64,
    **options,
) -> List[Record]:
    """Begin `number_of_samples` texts from nothing but the end-of-text token; write the records if a file is named.

    `options` are those of `generate_samples_from_prompt`. Greedy samples are all the same.
    """
    if number_of_samples < 1:
        raise ConfigError(f"num_samples={number_of_samples} must be at least 1")
    options.update(eos_token_id=eos_token_id, maximum_tokens=maximum_tokens)
    return _generate_to_file(neox_args, model, [""] * number_of_samples, output_file, options)


def generate_samples_interactive(
    neox_args,
    model,
    maximum_tokens: Optional[int] = 64,
    prompt_end: str = "\n",
    eos_token_id: Optional[int] = None,
    **options,
) -> None:
    """Ask for a prompt on rank 0, print the text as it grows, and ask again, until the input ends (Ctrl-D).

    A prompt ends with prompt_end. One that is too long is reported and asked for again.
    """
    eos = neox_args.tokenizer.eod if eos_token_id is None else eos_token_id
    runner = InferenceRunner.of(neox_args, model)
    options.update(eos_token_id=eos, maximum_tokens=maximum_tokens)
    seen = Counter()
    while True:
        prompt = from_rank_0_when_ready(lambda: _ask_until_valid(neox_args, prompt_end, eos))
        if prompt is None:
            show()
            return
        live = LiveText()
        record = _complete(neox_args, runner, *prompt, seen[prompt[0]], options, on_step=_live_printer(neox_args, live))
        seen[prompt[0]] += 1
        live.finish(record["text"] or "")
        if record["message"]:
            show(f"note: {record['message']}")
        show_summary(record["length"], 1, record["duration_seconds"], runner.cache_bytes)


def _generate_to_file(neox_args, model, prompts: List[str], output_file: Optional[str], options: dict) -> List[Record]:
    output = JSONLinesFile(output_file)
    from_rank_0(output.open)
    runner = InferenceRunner.of(neox_args, model)
    shown = []

    def keep(record: Record) -> None:
        output.write(record)
        shown.append(record)
        show_record(record, len(shown), len(prompts))

    with output:
        records = generate_samples_from_prompt(neox_args, runner, prompts, on_record=keep, **options)
    seconds = sum(record["duration_seconds"] for record in records)
    show_summary(sum(record["length"] for record in records), len(records), seconds, runner.cache_bytes)
    if output_file is not None:
        show(f"records written to {output_file}")
    return records


def _complete(
    neox_args,
    runner: InferenceRunner,
    prompt: str,
    tokens: List[int],
    sample: int,
    options: dict,
    on_step: Optional[Callable[[StreamState], None]] = None,
) -> Record:
    """The record of one prompt; `sample` counts the earlier texts from the same prompt."""
    generator = seeded_generator(runner.device, neox_args.seed, sample)
    start = time.perf_counter()
    for state in stream_tokens(neox_args, runner, [tokens], generator=generator, **options):
        if on_step is not None:
            on_step(state)
    return make_records(neox_args, [prompt], state, time.perf_counter() - start)[0]


def _live_printer(neox_args, live: LiveText) -> Callable[[StreamState], None]:
    def on_step(state: StreamState) -> None:
        tokens = state.tokens[0, state.start_index[0] : state.end_index[0] + 1].tolist()
        live.update(decode(neox_args, tokens) or "")

    return on_step


def _ask_until_valid(neox_args, prompt_end: str, eos: int) -> Optional[Tuple[str, List[int]]]:
    while True:
        prompt = ask_prompt(prompt_end)
        if prompt is None:
            return None
        try:
            return prompt, tokenize_prompt(neox_args, prompt, eos)
        except DataError as error:
            print(error, flush=True)
