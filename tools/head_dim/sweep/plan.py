"""The runs of a study: each variant's complete settings, at equal cost if asked, and each run's own config."""

import os
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from megatron import costs
from megatron.errors import ConfigError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.equal_widths import head_dims, one_or_each
from megatron.neox_arguments.resources import count_gpus, count_processes
from tools.head_dim import compare
from tools.head_dim.sweep.study import ADJUST, Study, Variant

RUNS = "runs"
LOGGED_STEPS = 50
LOOKS = 4
EVALUATIONS = 10


@dataclass(frozen=True)
class PlannedVariant:
    """A variant that is a valid config. settings: complete but for the seed and the run's folders. widths: of all
    layers, or a list with one for each layer, of groups of heads a tuple. memory: the cost model's estimate for one
    rank where the runs will be, in bytes."""

    variant: Variant
    settings: Dict[str, Any]
    widths: Dict[str, Any]
    parameters: int
    flops_per_token: float
    memory: int
    train_iters: int
    processes: int

    @property
    def name(self) -> str:
        return self.variant.name


@dataclass(frozen=True)
class Run:
    """folder: relative to the sweep's. config: all settings of this run, as its YAML gets them."""

    variant: PlannedVariant
    seed: int
    folder: str
    config: Dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"


def plan(study: Study, data_settings: Dict[str, Any]) -> List[PlannedVariant]:
    """The variants, in the study's order. data_settings: data_path, tokenizer and vocabulary, of prepared data.

    Raises ConfigError with the problems of all variants: no valid config, or none that costs the same.
    """
    problems: List[str] = []
    complete: List[Tuple[Variant, Dict[str, Any], NeoXArgs]] = []
    for variant in study.variants:
        given = study.settings_of(variant)
        settings = {**_usual(given), **given, **data_settings}
        try:
            complete.append((variant, settings, _arguments(settings)))
        except ConfigError as error:
            problems += [f"{variant.name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    baseline = next(args for variant, _, args in complete if variant.name == study.baseline)
    planned = []
    for variant, settings, args in complete:
        try:
            planned.append(_planned(study, variant, settings, args, baseline))
        except ConfigError as error:
            problems += [f"{variant.name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return planned


def runs(study: Study, planned: List[PlannedVariant]) -> List[Run]:
    """Seed by seed, so that all variants have been seen once as early as may be."""
    return [_run(variant, seed) for seed in study.seeds for variant in planned]


def _usual(given: Dict[str, Any]) -> Dict[str, Any]:
    """What a study need not say: how often things are logged, looked at and saved."""
    steps = given.get("train_iters")
    steps = steps if isinstance(steps, int) and steps > 0 else 1
    return {
        "log_interval": max(1, steps // LOGGED_STEPS),
        "log_head_diagnostics": max(1, steps // LOOKS),
        "eval_interval": max(1, steps // EVALUATIONS),
        "checkpoint_factor": max(1, steps // LOOKS),
        "keep_last_n_checkpoints": 1,
    }


def _arguments(settings: Dict[str, Any]) -> NeoXArgs:
    """Checked as the launcher will check them. Raises ConfigError or DataError."""
    args = NeoXArgs.from_dict({**settings, "global_num_gpus": count_processes(settings)})
    if not args.train_iters:
        raise ConfigError("train_iters is not set: a study has steps, the same for all its runs")
    args.rank = 0
    args.build_tokenizer()
    return args


def _planned(
    study: Study, variant: Variant, settings: Dict[str, Any], args: NeoXArgs, baseline: NeoXArgs
) -> PlannedVariant:
    if study.at_equal is not None and variant.name != study.baseline:
        equal = _equalised(study, args, baseline)
        before, after = args.given(), equal.given()
        changed = {key: after.get(key) for key in {*before, *after} if before.get(key) != after.get(key)}
        settings, args = {**settings, **changed}, equal
    return PlannedVariant(
        variant,
        settings,
        widths=_widths(args),
        parameters=costs.num_parameters(args),
        flops_per_token=costs.flops_per_token(args),
        memory=costs.memory_per_rank(args, device="cuda" if count_gpus() else "cpu").total,
        train_iters=args.train_iters,
        processes=args.global_num_gpus,
    )


def _widths(args: NeoXArgs) -> Dict[str, Any]:
    return {
        "head_dim": one_or_each(args, head_dims),
        "num_attention_heads": args.num_attention_heads,
        "num_kv_heads": one_or_each(args, lambda geometry: geometry.num_kv_heads),
        "query_width": one_or_each(args, lambda geometry: geometry.query_hidden_size),
        "ffn_hidden_size": args.mlp_geometry().ffn_hidden_size,
    }


def _equalised(study: Study, args: NeoXArgs, baseline: NeoXArgs) -> NeoXArgs:
    cost = compare.COST[study.at_equal]
    equal = compare.equalised(baseline, args, cost, ADJUST[study.adjust])
    off = cost(equal) / cost(baseline) - 1
    if abs(off) > study.tolerance:
        raise ConfigError(
            f"adjust={study.adjust}: the nearest to {study.baseline} has {off:+.1%} of its {study.at_equal}, more than "
            f"tolerance={study.tolerance:g}; adjust ffn_hidden_size, or allow more"
        )
    return equal


def _run(variant: PlannedVariant, seed: int) -> Run:
    folder = os.path.join(RUNS, variant.variant.slug, f"seed_{seed}")
    saved = os.path.join(folder, "checkpoints")
    own = {"seed": seed, "log_dir": folder, "save": saved, "load": saved}
    return Run(variant, seed, folder, {**variant.settings, **own})
