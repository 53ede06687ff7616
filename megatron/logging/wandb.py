"""Weights & Biases, if `use_wandb` is true. The only file that imports it."""

import os
from typing import Dict

from megatron.errors import ConfigError


class WandbSink:
    """One W&B run, named and grouped by the wandb_* arguments. Raises ConfigError where the package is missing."""

    def __init__(self, neox_args, rank: int = 0):
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "use_wandb=true needs Weights & Biases: pip install -r requirements/requirements-wandb.txt"
            ) from None
        if neox_args.wandb_host:
            os.environ.setdefault("WANDB_BASE_URL", neox_args.wandb_host)
        name = neox_args.wandb_run_name
        self._run = wandb.init(
            project=neox_args.wandb_project,
            entity=neox_args.wandb_team,
            group=neox_args.wandb_group,
            name=f"{name}-rank{rank}" if name and neox_args.wandb_init_all_ranks else name,
            config=neox_args.to_dict(),
        )

    def write(self, scalars: Dict[str, float], iteration: int) -> None:
        """Add one point to each named curve."""
        self._run.log(dict(scalars), step=iteration)

    def picture(self, name: str, path: str, iteration: int) -> None:
        """Add a PNG file."""
        import wandb

        self._run.log({name: wandb.Image(path)}, step=iteration)

    def close(self) -> None:
        """Upload what is left and end the run."""
        self._run.finish()
