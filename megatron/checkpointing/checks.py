"""What must agree between a checkpoint and the run that loads it."""

from typing import Any, Dict, List

from megatron.errors import CheckpointError


def raise_problems(folder: str, problems: List[str]) -> None:
    """One CheckpointError that lists every problem; nothing if there is none."""
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{folder} does not fit this run:\n{listed}")


def args_problems(neox_args, saved: Dict[str, Any], resharded: bool = False) -> List[str]:
    """Each of the settings recorded in the checkpoint whose value is another one now.

    resharded: the weights are split anew, so what follows from the number of ranks may differ.
    """
    free = ("model_parallel_size", "padded_vocab_size") if resharded else ("model_parallel_size",)
    return [
        f"{key}: {value!r} in the checkpoint, {_now(neox_args, key)!r} in the config"
        for key, value in saved.items()
        if key not in free and value != _now(neox_args, key)
    ]


def layout_problems(neox_args, engine, reader) -> List[str]:
    """Why the optimizer's state cannot be continued in this run's parallel layout, and what to do."""
    problems = _pipe_problems(neox_args, reader)
    if problems:
        return problems
    state = reader.rank_state(engine.checkpoint_mp_rank)
    saved = state.get("ds_config") or {}
    stages = _zero_stage(saved), engine.zero_optimization_stage()
    saved_in_pieces = state.get("param_shapes") is not None
    if saved_in_pieces != engine.zero_optimization():
        problems.append(f"zero_optimization.stage: {stages[0]} in the checkpoint, {stages[1]} in the config")
    elif optimizer_is_in_files(engine) and state.get("dp_world_size") != engine.dp_world_size:
        problems.append(
            f"data-parallel size: {state.get('dp_world_size')} in the checkpoint, {engine.dp_world_size} in this run, "
            "and the optimizer state is split over it"
        )
    for kind, wanted in (("fp16", engine.fp16_enabled()), ("bf16", engine.bfloat16_enabled())):
        if bool((saved.get(kind) or {}).get("enabled")) != bool(wanted):
            problems.append(f"precision: {kind} was {'off' if wanted else 'on'} in the checkpoint's run")
    if state.get("optimizer") is None and not saved_in_pieces:
        problems.append("it has no optimizer state (saved with no_save_optim)")
    return [f"{problem}; {_REMEDY}" for problem in problems]


def optimizer_is_in_files(engine) -> bool:
    """Each data-parallel rank writes its piece of the state: under ZeRO, and for DeepSpeed's bf16 optimizer."""
    return engine.zero_optimization() or hasattr(engine.optimizer, "dp_process_group")


_REMEDY = "use the checkpoint's setting, or set no_load_optim=true (or finetune=true) to take only its weights"


def _pipe_problems(neox_args, reader) -> List[str]:
    sizes = reader.pipe_parallel_size, neox_args.pipe_parallel_size
    if sizes[0] == sizes[1]:
        return []
    return [f"pipe_parallel_size: {sizes[0]} in the checkpoint, {sizes[1]} in the config; {_REMEDY}"]


def _zero_stage(ds_config: Dict[str, Any]) -> int:
    return (ds_config.get("zero_optimization") or {}).get("stage", 0)


def _now(neox_args, key: str) -> Any:
    """One head_dim is compared with the width in use, whether or not the config names it."""
    if key == "head_dim" and neox_args.has_uniform_heads:
        return neox_args.head_geometry().head_dim
    return getattr(neox_args, key, None)
