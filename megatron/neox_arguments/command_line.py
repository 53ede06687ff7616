"""The command line of deepy.py, and the flags that carry a config from the launcher to each process."""

import argparse
import base64
import json
import os
import secrets
import shlex
from typing import Any, Dict, List, Optional, Sequence, Tuple

from megatron.errors import ConfigError
from megatron.neox_arguments.fields import NeoXArgsDeepspeedRunner

_OVERRIDES = (
    ("--wandb_group", dict(help="replaces wandb_group")),
    ("--wandb_run_name", dict(help="replaces wandb_run_name")),
    ("--wandb_team", dict(help="replaces wandb_team")),
    ("--eval_tasks", dict(nargs="+", help="replaces eval_tasks")),
    ("--iteration", dict(type=int, help="iteration of the checkpoint to load; default: the latest")),
    ("--eval_results_prefix", dict(help="replaces eval_results_prefix")),
    ("--perplexity", dict(dest="perplexity_file", metavar="FILE", help="text that eval.py measures the loss of")),
)
_SHORT_OVERRIDES = (
    ("-H", "--hostfile", "replaces hostfile"),
    ("-i", "--sample_input_file", "file of prompts for generate.py"),
    ("-o", "--sample_output_file", "where generate.py writes"),
)


def parse_deepy(arguments: Optional[Sequence[str]] = None) -> Tuple[List[str], Dict[str, Any]]:
    """(config paths, values that win over the configs) from deepy.py's command line.

    Raises ConfigError if the script does not exist; SystemExit on --help or a malformed command line.
    """
    options = vars(_deepy_parser().parse_args(arguments))
    folder, names = options.pop("conf_dir"), options.pop("conf_file")
    autotuning = options.pop("autotuning")
    overrides = {name: value for name, value in options.items() if value is not None}
    if autotuning is not None:
        overrides["autotuning_run"] = autotuning
    if not os.path.isfile(overrides["user_script"]):
        raise ConfigError(f"{overrides['user_script']}: no such script; the first argument is the script to run")
    return [config_path(name, folder) for name in names], overrides


def config_path(name: str, folder: Optional[str] = None) -> str:
    """`name` in `folder`, with .yml appended unless it already ends in .yml or .json."""
    path = os.path.join(folder, name) if folder else name
    return path if path.endswith((".yml", ".json")) else path + ".yml"


def _deepy_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepy.py",
        description="Start a script on all processes that a config asks for: CPU cores or GPUs of this machine, or "
        "the machines of a hostfile.",
        epilog="example: python deepy.py train.py configs/demo/qwen3-tiny-cpu.yml configs/demo/tp2.yml",
        allow_abbrev=False,
    )
    parser.add_argument("user_script", help="script to run: train.py, generate.py or eval.py")
    parser.add_argument("conf_file", nargs="+", help="config files, merged; .yml is appended when missing")
    parser.add_argument("-d", "--conf_dir", help="folder of the config files")
    for flag, options in _OVERRIDES:
        parser.add_argument(flag, **options)
    for short, flag, text in _SHORT_OVERRIDES:
        parser.add_argument(short, flag, help=text)
    parser.add_argument("--autotuning", choices=("tune", "run"), help="DeepSpeed's autotuning")
    return parser


def parse_rank(arguments: Optional[Sequence[str]] = None) -> Dict[str, Any]:
    """The configured values from --megatron_config, as deepy.py passed them. Other flags are left alone.

    Raises ConfigError if the flag is missing or damaged.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--megatron_config")
    parser.add_argument("--deepspeed_config")
    options, _ = parser.parse_known_args(arguments)
    if options.megatron_config is None:
        raise ConfigError("no configuration: start with `python deepy.py SCRIPT CONFIG...`")
    return decode(options.megatron_config)


def encode(values: Dict[str, Any]) -> str:
    """JSON in URL-safe base64, so that no shell on the way changes it."""
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def decode(text: str) -> Dict[str, Any]:
    """Inverse of `encode`. Raises ConfigError."""
    try:
        values = json.loads(base64.urlsafe_b64decode(text))
    except ValueError as error:
        raise ConfigError(f"--megatron_config cannot be decoded: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("--megatron_config does not hold a mapping of settings")
    return values


def runner_args(args: Any) -> List[str]:
    """DeepSpeed's launcher arguments that differ from their defaults, the script, and the two config flags."""
    flags: Dict[str, Any] = {}
    for name, field in NeoXArgsDeepspeedRunner.__dataclass_fields__.items():
        value = getattr(args, name)
        if name == "force_multi":
            value = value or args.deepspeed_slurm or args.deepspeed_mpi
        if value != field.default:
            flags[name] = value
    flags["autotuning"] = flags.pop("autotuning_run", None)
    slurm_options = [f"--{name}={flags.pop(name)}" for name in ("comment", "account") if name in flags]
    flags.setdefault("hostfile", os.environ.get("DLTS_HOSTFILE"))
    flags.setdefault("master_addr", os.environ.get("MASTER_ADDR"))
    if "include" in flags or "exclude" in flags:  # DeepSpeed takes one way of choosing devices
        flags.pop("num_gpus", None)
        flags.pop("num_nodes", None)
    result = [part for name, value in flags.items() for part in _flag(name, value)]
    if slurm_options:
        result.append(f"--launcher_args={shlex.join(slurm_options)}")
    return [*result, args.user_script, *rank_args(args)]


def rank_args(args: Any) -> List[str]:
    """The flags from which each process reads its configuration; see parse_rank."""
    values = {**args.given(), "global_num_gpus": args.global_num_gpus}
    return ["--deepspeed_config", encode(args.deepspeed_config), "--megatron_config", encode(values)]


def _flag(name: str, value: Any) -> List[str]:
    if value is None or value is False:
        return []
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def unique_name(prefix: Optional[str]) -> str:
    """`prefix` and eight random characters."""
    return "_".join(filter(None, (prefix, secrets.token_hex(4))))
