"""The whole run: start, model, checkpoint, data, loop, last evaluation, last checkpoint."""

import os
import time
from typing import Any, Dict, Iterator, Optional

from megatron import allocator, costs, mpu
from megatron.checkpointing import save_checkpoint
from megatron.data import build_train_valid_test_data_iterators
from megatron.data.data_utils import set_train_iters
from megatron.initialize import initialize_megatron, print_rank_0
from megatron.logging import TrainingLogger, quiet_libraries, tee_output
from megatron.training.diagnostics import Diagnostics
from megatron.training.engine import setup_model_and_optimizer
from megatron.training.evaluation import evaluate
from megatron.training.head_logging import HeadLog
from megatron.training.profiling import profiler
from megatron.training.saving import is_save_iter
from megatron.training.step import train_step
from megatron.training.stopping import Health, StopSignal


def pretrain(neox_args) -> int:
    """Train as `neox_args` says; called on every rank. Returns the iteration reached.

    A signal (SIGTERM, SIGINT, SIGUSR1) or exit_interval ends the run early, with a checkpoint if `save` is set.

    Raises NeoXError for what is the user's to fix.
    """
    quiet_libraries(neox_args)
    initialize_megatron(neox_args)
    with tee_output(neox_args.log_dir, neox_args.rank), StopSignal() as stop:
        if neox_args.padded_vocab_size is None:
            neox_args.build_tokenizer()
        set_train_iters(neox_args)
        _announce(neox_args)
        engine = setup_model_and_optimizer(neox_args)
        train, valid, test = build_train_valid_test_data_iterators(neox_args)
        logger = TrainingLogger(neox_args, costs.flops_per_token(neox_args), neox_args.iteration)
        run = _Run(neox_args, engine, logger, stop)
        try:
            finished = run.train(train, valid)
            if finished:
                run.finish(valid, test)
        finally:
            logger.close()
    return run.iteration


def _announce(neox_args) -> None:
    print_rank_0(costs.geometry_table(neox_args))
    layout = (
        f"pipe {mpu.get_pipe_parallel_world_size()} x data {mpu.get_data_parallel_world_size()} x "
        f"model {mpu.get_model_parallel_world_size()}"
    )
    print_rank_0(
        f"building the model on {neox_args.world_size} process(es), {layout}, {mpu.current_device().type}, "
        f"{neox_args.precision}, ZeRO {neox_args.zero_stage}, {neox_args.optimizer_type}"
    )
    if allocator.note():
        print_rank_0(allocator.note())


class _Run:
    """The loop and what it needs at each step."""

    def __init__(self, neox_args, engine, logger: TrainingLogger, stop: StopSignal):
        self._args = neox_args
        self._engine = engine
        self._logger = logger
        self._stop = stop
        self._health = Health(dynamic_loss_scale=engine.fp16_enabled() and engine.dynamic_loss_scale())
        self._diagnostics = Diagnostics(neox_args, engine)
        self._heads = HeadLog(neox_args, engine)
        self._saved_at: Optional[int] = neox_args.iteration if _continues(neox_args) else None
        self._evaluated_at: Optional[int] = None
        self.iteration: int = neox_args.iteration

    def train(self, train: Optional[Iterator], valid: Optional[Iterator]) -> bool:
        """Step until train_iters; False if the run ends before, for a signal or exit_interval."""
        self._save_first()
        if self.iteration >= self._args.train_iters:
            self._logger.message(f"iteration {self.iteration}: train_iters={self._args.train_iters} is reached already")
            return True
        self._logger.message(f"training from iteration {self.iteration} to {self._args.train_iters}")
        self._engine.train()
        with profiler(self._args) as profile_step:
            while self.iteration < self._args.train_iters:
                self._step(train)
                profile_step()
                if self._args.save and is_save_iter(self._args, self.iteration):
                    self._save()
                if self._is_eval_iter():
                    self._evaluate(valid)
                if self._must_stop():
                    return False
        return True

    def finish(self, valid: Optional[Iterator], test: Optional[Iterator]) -> None:
        """The last validation, the last checkpoint, and the test data."""
        if self._args.do_valid and self._evaluated_at != self.iteration:
            self._evaluate(valid)
        if self.iteration != 0:
            self._save()
        if self._args.do_test:
            self._evaluate(test, "test")

    def _step(self, train: Iterator) -> None:
        self._diagnostics.want(self.iteration + 1)
        self._heads.want(self.iteration + 1)
        started = time.perf_counter()
        metrics: Dict[str, Any] = train_step(self._args, self._engine, train)
        metrics["seconds"] = time.perf_counter() - started
        metrics["scalars"] = self._diagnostics.take()
        self.iteration += 1
        self._args.iteration = self.iteration
        self._logger.log_step(self.iteration, metrics)
        self._heads.write(self.iteration, self._logger)
        problem = self._health.check(self.iteration, metrics)
        if problem is not None:
            self._logger.message(problem)

    def _is_eval_iter(self) -> bool:
        interval = self._args.eval_interval
        return bool(self._args.do_valid and interval and self.iteration % interval == 0)

    def _evaluate(self, data: Iterator, split: str = "valid") -> None:
        self._logger.log_eval(self.iteration, evaluate(self._args, self._engine, data), split)
        if split == "valid":
            self._evaluated_at = self.iteration

    def _must_stop(self) -> bool:
        signal_name = self._stop.agreed()
        interval = self._args.exit_interval
        if signal_name is not None:
            reason = f"received {signal_name}"
        elif interval and self.iteration % interval == 0 and self.iteration < self._args.train_iters:
            reason = f"exit_interval={interval}"
        else:
            return False
        self._save()
        self._logger.message(f"stopping after iteration {self.iteration}: {reason}")
        return True

    def _save_first(self) -> None:
        """extra_save_iters may ask for the untrained model."""
        if self.iteration == 0 and 0 in (self._args.extra_save_iters or ()):
            self._save()

    def _save(self) -> None:
        if not self._args.save or self._saved_at == self.iteration:
            return
        if not self._health.is_good:
            self._logger.message(f"iteration {self.iteration}: no checkpoint, because the loss is not finite")
            return
        folder = save_checkpoint(self._args, self.iteration, self._engine)
        self._saved_at = self.iteration
        self._logger.message(f"saved {folder}")


def _continues(neox_args) -> bool:
    """What was loaded is a checkpoint of this very run, and need not be written again."""
    if not neox_args.load or not neox_args.save or neox_args.iteration == 0:
        return False
    return os.path.realpath(neox_args.load) == os.path.realpath(neox_args.save)
