"""The learning rate as a function of the optimizer steps taken: linear warm-up, then one of four decays."""

import math
from typing import Any, Dict

from megatron.errors import CheckpointError, ConfigError

_SAVED = ("start_lr", "warmup_iter", "num_iters", "decay_style", "end_iter", "min_lr")
"""The keys of a schedule in GPT-NeoX's checkpoints, in their order."""
_CHECKED_ON_LOAD = tuple(key for key in _SAVED if key != "num_iters")


def learning_rate(step: int, *, start_lr: float, min_lr: float, warmup_iter: float, end_iter: int, decay_style: str):
    """Learning rate after `step` optimizer steps.

    Warm-up: start_lr * max(1, step) / warmup_iter, so steps 0 and 1 are equal; never more than start_lr (a warm-up
    shorter than one step would otherwise give a multiple of it). Then, with f the fraction of
    (end_iter - warmup_iter) that is done:

    - constant:     start_lr
    - linear:       start_lr * (1 - f)
    - cosine:       min_lr + (start_lr - min_lr) * (1 + cos(pi f)) / 2; f stops at 1
    - exponential:  start_lr * exp(-0.693 f), that is half of it at f = 1

    and never below min_lr.
    """
    if warmup_iter > 0 and step <= warmup_iter:
        return start_lr * min(1.0, max(1, step) / warmup_iter)
    span = end_iter - warmup_iter
    done = (step - warmup_iter) / span if span > 0 else 1.0
    if decay_style == "constant":
        rate = start_lr
    elif decay_style == "linear":
        rate = start_lr * (1.0 - done)
    elif decay_style == "cosine":
        rate = min_lr + (start_lr - min_lr) / 2.0 * (math.cos(math.pi * min(done, 1.0)) + 1.0)
    elif decay_style == "exponential":
        rate = start_lr * math.exp(-0.693 * done)
    else:
        raise ConfigError(f"lr_decay_style={decay_style!r} must be constant, linear, cosine or exponential")
    return max(rate, min_lr)


class AnnealingLR:
    """Sets the rate of every parameter group of `optimizer`; `step()` is called once per optimizer step.

    `num_iters` counts the steps taken. On load the schedule in the checkpoint must equal this one, unless
    `override_lr_scheduler` (keep this one) or `use_checkpoint_lr_scheduler` (take the checkpoint's) is set.
    """

    def __init__(
        self,
        optimizer,
        *,
        start_lr: float,
        warmup_iter: float,
        end_iter: int,
        decay_style: str,
        min_lr: float = 0.0,
        num_iters: int = 0,
        override_lr_scheduler: bool = False,
        use_checkpoint_lr_scheduler: bool = False,
    ):
        if override_lr_scheduler and use_checkpoint_lr_scheduler:
            raise ConfigError("override_lr_scheduler and use_checkpoint_lr_scheduler contradict each other; set one")
        if end_iter <= 0:
            raise ConfigError(f"lr_decay_iters={end_iter} must be positive")
        self.optimizer = optimizer
        self.start_lr = float(start_lr)
        self.min_lr = float(min_lr)
        self.warmup_iter = warmup_iter
        self.end_iter = end_iter
        self.decay_style = decay_style
        self.num_iters = num_iters
        self._override = override_lr_scheduler
        self._use_checkpoint = use_checkpoint_lr_scheduler
        self.step(num_iters)

    def get_lr(self) -> float:
        """The rate for the next optimizer step."""
        return learning_rate(self.num_iters, **{key: getattr(self, key) for key in _CHECKED_ON_LOAD})

    def step(self, step_num: int | None = None) -> None:
        """Count one step (or jump to `step_num`) and set the rates."""
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        rate = self.get_lr()
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> Dict[str, Any]:
        """See _SAVED."""
        return {key: getattr(self, key) for key in _SAVED}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue a saved schedule. Raises CheckpointError if it is another one and neither switch is set."""
        different = [key for key in _CHECKED_ON_LOAD if state[key] != getattr(self, key)]
        if different and not (self._override or self._use_checkpoint):
            changes = [f"{key}: {state[key]} in the checkpoint, {getattr(self, key)} here" for key in different]
            raise CheckpointError(
                f"the learning rate schedule differs from the checkpoint's ({', '.join(changes)}); set "
                "override_lr_scheduler to use the config's or use_checkpoint_lr_scheduler to use the checkpoint's"
            )
        if not self._override:
            for key in _CHECKED_ON_LOAD:
                setattr(self, key, state[key])
        self.step(state["num_iters"])


def get_learning_rate_scheduler(neox_args, optimizer) -> AnnealingLR:
    """The schedule a config asks for: lr_decay_iters steps, else that fraction of train_iters, else train_iters."""
    if neox_args.lr_decay_iters is not None:
        end_iter = neox_args.lr_decay_iters
    elif neox_args.lr_decay_fraction is not None:
        end_iter = math.floor(neox_args.train_iters * neox_args.lr_decay_fraction)
    else:
        end_iter = neox_args.train_iters
    end_iter = max(1, end_iter)
    return AnnealingLR(
        optimizer,
        start_lr=neox_args.lr,
        warmup_iter=neox_args.warmup * end_iter,
        end_iter=end_iter,
        decay_style=neox_args.lr_decay_style,
        min_lr=neox_args.min_lr,
        override_lr_scheduler=neox_args.override_lr_scheduler,
        use_checkpoint_lr_scheduler=neox_args.use_checkpoint_lr_scheduler,
    )
