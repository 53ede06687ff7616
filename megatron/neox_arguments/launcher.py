"""Start a script on every process a config asks for: on this machine's CPUs, else through DeepSpeed's launcher."""

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any, List, Optional, Sequence

from megatron.errors import NeoXError
from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.command_line import rank_args
from megatron.neox_arguments.local_launch import run_local
from megatron.neox_arguments.resources import count_gpus, hostfile_path

_QUIET = ("--log_level", "critical")
_FATAL_SIGNALS = frozenset(
    {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV}
)
_LOCAL_LAUNCH = "deepspeed.launcher.launch"


def launch(input_args: Optional[Sequence[str]] = None) -> None:
    """deepy.py: read the command line, check the config, start the processes, wait, and end as they ended.

    Raises ConfigError before any process is started; SystemExit with the exit code of the rank that failed, or with
    128 + the signal's number if a signal ended the run.
    """
    args = prepare(NeoXArgs.consume_deepy_args(input_args))
    with _watched_children() as children:
        if _is_on_these_cpus(args):
            code = _run_here(args)
        else:
            code = _run_deepspeed(args.get_deepspeed_main_args())
            code = next((child.returncode for child in children if child.returncode), code)
    number = _fatal_signal(code)
    if number:
        print(f"error: a process was ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    sys.exit(128 + number if number else code)


def _is_on_these_cpus(args: NeoXArgs) -> bool:
    elsewhere = args.force_multi or args.deepspeed_slurm or args.deepspeed_mpi or hostfile_path(args.hostfile)
    return not elsewhere and not count_gpus()


def _run_here(args: NeoXArgs) -> int:
    try:
        return run_local(args.user_script, rank_args(args), args.global_num_gpus, args.master_port)
    except OSError as error:
        raise NeoXError(f"the processes could not be started: {error}") from None


def _run_deepspeed(command: List[str]) -> int:
    """Its own messages are switched off: it would print the whole encoded config several times."""
    from deepspeed.launcher import runner

    try:
        runner.main([*_QUIET, *command])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as error:
        raise NeoXError(f"DeepSpeed's launcher could not start the processes: {error}") from None
    return 0


def _fatal_signal(code: int) -> int:
    """The signal behind an exit code, or 0.

    DeepSpeed's local launcher ends with the negative number of the signal that ended a rank, of which the system
    keeps the lowest eight bits.
    """
    number = 256 - code if code > 192 else -code
    return number if number in _FATAL_SIGNALS else 0


def prepare(args: NeoXArgs) -> NeoXArgs:
    """Set up the environment that the processes inherit; return the arguments with a port and a number of processes."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", extensions_folder())
    if hostfile_path(args.hostfile) is not None:
        return args
    changes = {} if args.given().get("master_port") else {"master_port": free_port()}
    if not count_gpus():
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(args.global_num_gpus)))
        changes["num_gpus"] = args.global_num_gpus
    return args.update(**changes)


def threads_per_process(processes: int) -> int:
    """An equal share of the cores this process may use, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def extensions_folder() -> str:
    """Where torch builds extensions: one folder for each Python environment.

    torch's default is shared by all environments of a user; two that build at once wait for each other's lock.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return os.path.join(cache, "megatron", "torch_extensions", environment)


def free_port() -> int:
    """A port nobody listens on. The fixed default would let two runs started together take the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _watched_children():
    """Collect the processes DeepSpeed's launcher starts, and pass SIGINT and SIGTERM on to them.

    DeepSpeed does neither: a SIGTERM would end it and leave the ranks running, and it takes a launch that was killed
    for a success.
    """
    children: List[Any] = []
    received: List[int] = []
    original = subprocess.Popen

    class WatchedPopen(original):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            children.append(self)

    def pass_on(number, frame):
        received.append(number)
        for target in _targets(children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number if len(received) == 1 else signal.SIGKILL)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    subprocess.Popen = WatchedPopen
    try:
        yield children
    finally:
        subprocess.Popen = original
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        sys.exit(128 + received[0])


def _targets(children: Sequence[Any]) -> List[int]:
    """Process ids to signal: this machine's ranks where DeepSpeed started them, else the launcher's own child.

    The ranks are addressed past DeepSpeed's local launcher, which would kill them 30 seconds later, in the middle of
    a last checkpoint. It ends by itself when they have.
    """
    import psutil

    targets = []
    for child in children:
        if child.poll() is not None:
            continue
        if _LOCAL_LAUNCH in child.args:
            with contextlib.suppress(psutil.NoSuchProcess):
                targets += [process.pid for process in psutil.Process(child.pid).children()]
        else:
            targets.append(child.pid)
    return targets
