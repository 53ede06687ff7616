"""lm-evaluation-harness: the model as it sees it, and its tasks run. The only file that imports lm_eval."""

import json
import os
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from megatron.errors import ConfigError, DataError
from megatron.evaluation.completion import Completion, check_completions
from megatron.evaluation.scoring import Pair, check_pairs
from megatron.evaluation.text import encode, first_context, rolling_windows
from megatron.text_generation.sampling import SamplingSettings
from megatron.text_generation.stream import context_limit

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    raise ConfigError(
        "eval_tasks needs lm-evaluation-harness: pip install -r requirements/requirements-eval.txt "
        f"(import failed: {error}); --perplexity FILE works without it"
    ) from None

BOOTSTRAP_ITERATIONS = 10_000
"""GPT-NeoX's, for standard errors that have no formula."""
MAXIMUM_TOKENS = 256
"""The harness's own default for a task that sets no max_gen_toks."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names for the most tokens of a text; the first that is set counts."""
_WITHOUT_EFFECT = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1, 1.0),
    "use_cache": (True,),
}
"""Generation settings of Hugging Face's and their values that ask for nothing special."""

Call = Callable[..., Any]


class NeoXLM(TemplateLM):
    """A model of ours for the harness. It runs on rank 0 only; call(name, requests, ...) reaches all ranks.

    call("score", pairs) -> (log-probability, greedy) of each; call("complete", completions) -> texts.
    """

    def __init__(self, neox_args, call: Call):
        super().__init__()
        self._args = neox_args
        self._call = call
        self._tokenizer = neox_args.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on."""
        return first_context(self._tokenizer)

    @property
    def max_length(self) -> int:
        return context_limit(self._args)

    @property
    def max_gen_toks(self) -> int:
        return MAXIMUM_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Names the harness's cache of requests."""
        return f"{self._args.tokenizer_type}_{self._args.vocab_file}".replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **kwargs) -> List[int]:
        return encode(self._tokenizer, string, special=add_special_tokens is not False)

    def tok_decode(self, tokens: Sequence[int], **kwargs) -> str:
        return self._tokenizer.detokenize(tokens)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> List[Tuple[float, bool]]:
        answers = self._score([(context, continuation) for _, context, continuation in requests])
        for (key, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> List[float]:
        """The log-probability of whole texts, in windows when they are long."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            found = rolling_windows(self.tok_encode(text), self.prefix_token_id, self.max_length)
            windows += found
            owners += [number] * len(found)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._score(windows), strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> List[str]:
        completions = [self._completion(*request.args) for request in requests]
        check_completions(self._args, completions)
        texts = self._call("complete", completions)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _score(self, pairs: List[Pair]) -> List[Tuple[float, bool]]:
        pairs = [(context or [self.prefix_token_id], continuation) for context, continuation in pairs]
        check_pairs(self._args, pairs)  # here, on the rank that asks
        return self._call("score", pairs)

    def _completion(self, context: str, settings: Dict[str, Any]) -> Completion:
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        return completion(tokens, settings)


def completion(tokens: Sequence[int], settings: Dict[str, Any]) -> Completion:
    """What a task's generation_kwargs ask for. Raises ConfigError for those that cannot be followed."""
    rest = dict(settings)
    until = rest.pop("until", None) or ()
    lengths = [length for length in (rest.pop(name, None) for name in _LENGTHS) if length is not None]
    temperature = float(rest.pop("temperature", None) or 0.0)
    top_k, top_p = rest.pop("top_k", None), rest.pop("top_p", None)
    samples = rest.pop("do_sample", None)
    if samples is None:
        samples = temperature > 0
    unknown = [
        f"generation_kwargs: {name}={value!r} of the task is not built; remove it from a copy of the task"
        for name, value in rest.items()
        if value not in _WITHOUT_EFFECT.get(name, ())
    ]
    if unknown:
        raise ConfigError(unknown)
    sampling = SamplingSettings()
    if samples:
        sampling = SamplingSettings(temperature or 1.0, int(top_k or 0), float(top_p or 0.0))
    return Completion(
        tuple(tokens),
        (until,) if isinstance(until, str) else tuple(until),
        int(lengths[0]) if lengths else MAXIMUM_TOKENS,
        sampling,
    )


class Tasks:
    """The tasks that eval_tasks names, found but not yet loaded."""

    def __init__(self, neox_args):
        """Raises ConfigError for names that no task, group or file has."""
        self._args = neox_args
        self._manager = TaskManager(include_path=neox_args.eval_task_folder)
        self.names = _matching(neox_args.eval_tasks, self._manager)

    def run(self, call: Call) -> Dict[str, Any]:
        """The harness's results. Raises DataError if a task's data cannot be had."""
        args = self._args
        try:
            results = simple_evaluate(
                NeoXLM(args, call),
                tasks=self.names,
                num_fewshot=args.eval_num_fewshot,
                limit=args.eval_limit,
                bootstrap_iters=BOOTSTRAP_ITERATIONS,
                task_manager=self._manager,
                log_samples=False,
            )
        except OSError as error:  # data sets and metrics are fetched when they are first used
            raise DataError(f"eval_tasks={' '.join(self.names)}: data of a task could not be read: {error}") from error
        results["config"].update(model="neox", batch_size=None, **_description(args))
        return results


def tables(results: Dict[str, Any]) -> str:
    """The results as the harness prints them."""
    return "\n".join(make_table(results, column) for column in ("results", "groups") if results.get(column))


def _description(neox_args) -> Dict[str, Any]:
    settings = {name: value for name, value in neox_args.non_default().items() if name != "config_files"}
    return {"model_args": json.loads(json.dumps(settings, default=str)), "iteration": neox_args.iteration}


def _matching(patterns: Sequence[str], manager: TaskManager) -> List[str]:
    """Names of tasks, groups and tags that match a pattern such as arc_*, and the paths of task files."""
    names, missing = [], []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else manager.match_tasks([pattern])
        names += found
        if not found:
            missing.append(
                f"eval_tasks={pattern}: no such task; see `lm_eval ls tasks`, or name a YAML file, or set "
                "eval_task_folder to a folder of task files"
            )
    if missing:
        raise ConfigError(missing)
    return list(dict.fromkeys(names))
