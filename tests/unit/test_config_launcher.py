"""deepy.py: its command line, the argument list for DeepSpeed's launcher, and how runs end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.errors import ConfigError, NeoXError
from megatron.neox_arguments import NeoXArgs, command_line, launcher, resources
from tests.helpers.configs import tiny_args, tiny_values

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEEPY = os.path.join(ROOT, "deepy.py")
ENVIRONMENT = (*("DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "MASTER_ADDR", "DLTS_HOSTFILE"),)
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A script, a model config and a run config, on a machine without GPUs, hostfile or launcher variables."""
    (tmp_path / "script.py").write_text("")
    values = {**tiny_values(), "wandb_group": "g"}
    (tmp_path / "model.yml").write_text(json.dumps(values))
    (tmp_path / "run.json").write_text(json.dumps({"model-parallel-size": 2}))
    for name in ENVIRONMENT + RANKS:
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


def deepy(folder, *arguments):
    return NeoXArgs.consume_deepy_args([str(folder / "script.py"), "-d", str(folder), *arguments])


def flags_of(args):
    """DeepSpeed's own reading of the argument list it is given."""
    return parsed(args.get_deepspeed_main_args())


def parsed(command):
    from deepspeed.launcher.runner import parse_args

    return parse_args(command)


def test_command_line_wins_over_the_files_and_yml_is_appended(folder):
    args = deepy(folder, "model", "run.json", "--wandb_group", "h", "--iteration", "5", "-i", "in.txt", "-o", "out.txt")
    assert (args.wandb_group, args.iteration, args.model_parallel_size) == ("h", 5, 2)
    assert (args.sample_input_file, args.sample_output_file, args.text_gen_type) == ("in.txt", "out.txt", "input-file")
    assert args.user_script == str(folder / "script.py")
    assert set(args.config_files) == {"model.yml", "run.json"}
    assert args.global_num_gpus == 2


def test_a_missing_script_and_a_missing_config(folder):
    with pytest.raises(ConfigError, match="absent.py"):
        NeoXArgs.consume_deepy_args([str(folder / "absent.py"), "model"])
    with pytest.raises(ConfigError, match="models.yml.*did you mean .*model.yml"):
        deepy(folder, "models")


def test_every_run_has_a_wandb_group_of_its_own(folder):
    (folder / "wandb.yml").write_text("use_wandb: true")
    groups = {deepy(folder, "model", "wandb").wandb_group for _ in range(3)}
    assert len(groups) == 3 and all(group.startswith("g_") for group in groups)


def test_ranks_rebuild_the_launchers_arguments(folder, monkeypatch):
    args = deepy(folder, "model", "run.json")
    command = args.get_deepspeed_main_args()
    script = command.index(str(folder / "script.py"))
    flags = command[script + 1 :]
    assert flags[::2] == ["--deepspeed_config", "--megatron_config"]
    assert command_line.decode(flags[1]) == args.deepspeed_config
    for rank in range(2):
        for name, value in zip(RANKS, (rank, rank, 2), strict=True):
            monkeypatch.setenv(name, str(value))
        built = NeoXArgs.consume_neox_args(input_args=[f"--local_rank={rank}", *flags])
        built.configure_distributed_args()
        assert built == args.update(rank=rank, local_rank=rank, world_size=2)


def test_on_cpus_as_many_processes_as_the_model_needs_are_started(folder):
    flags = flags_of(launcher.prepare(deepy(folder, "model", "run.json")))
    assert flags.num_gpus == 2 and flags.user_script == str(folder / "script.py")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert os.environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert os.environ["TORCH_EXTENSIONS_DIR"] == launcher.extensions_folder()


def test_num_gpus_is_the_number_of_cpu_processes(folder):
    (folder / "dp.yml").write_text("num_gpus: 3")
    args = deepy(folder, "model", "dp")
    assert args.train_batch_size == 6 and flags_of(launcher.prepare(args)).num_gpus == 3


def test_what_the_user_set_in_the_environment_stays(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/mine")
    launcher.prepare(deepy(folder, "model"))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCH_EXTENSIONS_DIR"]) == ("7", "/mine")


def test_the_port_is_free_unless_the_user_chose_one(folder):
    ports = {flags_of(launcher.prepare(deepy(folder, "model"))).master_port for _ in range(3)}
    assert 29500 not in ports and len(ports) > 1
    (folder / "port.yml").write_text("master_port: 29500")
    assert flags_of(launcher.prepare(deepy(folder, "model", "port"))).master_port == 29500


def test_on_gpus_deepspeed_is_left_to_take_them_all(folder, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    for module in (resources, launcher):
        monkeypatch.setattr(module, "count_gpus", lambda: 4)
    args = deepy(folder, "model", "run.json")
    assert args.global_num_gpus == 4 and args.train_batch_size == 4
    flags = flags_of(launcher.prepare(args))
    assert flags.num_gpus == -1
    assert "DS_ACCELERATOR" not in os.environ and "OMP_NUM_THREADS" not in os.environ
    (folder / "fewer.yml").write_text("num_gpus: 2")
    args = deepy(folder, "model", "fewer")
    assert args.global_num_gpus == 2 and flags_of(launcher.prepare(args)).num_gpus == 2
    (folder / "some.yml").write_text("include: localhost:1,3")
    args = deepy(folder, "model", "some")
    assert args.global_num_gpus == 2 and flags_of(launcher.prepare(args)).include == "localhost:1,3"
    (folder / "more.yml").write_text("num_gpus: 8")
    with pytest.raises(ConfigError, match="num_gpus=8 is more than the 4"):
        deepy(folder, "model", "more")


HOSTS = [
    ({}, 8, {}),
    (dict(num_nodes=1), 4, dict(num_nodes=1)),
    (dict(num_gpus=2), 4, dict(num_gpus=2)),
    (dict(include="b:0,1"), 2, dict(include="b:0,1")),
    (dict(exclude="a"), 4, dict(exclude="a")),
    (dict(launcher="openmpi", deepspeed_mpi=True), 8, dict(launcher="openmpi", force_multi=True)),
    (dict(launcher="mvapich"), 8, dict(launcher="mvapich")),
    (
        dict(launcher="slurm", deepspeed_slurm=True, account="us", comment="two words"),
        8,
        dict(launcher="slurm", force_multi=True, launcher_args="'--comment=two words' --account=us"),
    ),
    (dict(master_addr="10.0.0.1", no_ssh_check=True), 8, dict(master_addr="10.0.0.1", no_ssh_check=True)),
]


@pytest.mark.parametrize("values, processes, expected", HOSTS, ids=lambda value: str(value)[:40])
def test_several_hosts(folder, values, processes, expected):
    (folder / "hosts").write_text("a slots=4\nb slots=4\n")
    (folder / "cluster.yml").write_text(json.dumps({**values, "hostfile": str(folder / "hosts")}))
    args = deepy(folder, "model", "cluster")
    assert args.global_num_gpus == processes and args.train_batch_size == 2 * processes
    flags = vars(flags_of(launcher.prepare(args)))
    standard = vars(parsed(["script.py"]))
    user = ("hostfile", "user_script", "user_args")
    changed = {name: value for name, value in flags.items() if value != standard[name] and name not in user}
    assert changed == expected and flags["hostfile"] == str(folder / "hosts")


def test_hostfile_and_address_from_the_environment(folder, monkeypatch):
    (folder / "hosts").write_text("a slots=3\n")
    monkeypatch.setenv("DLTS_HOSTFILE", str(folder / "hosts"))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")
    args = deepy(folder, "model")
    flags = flags_of(launcher.prepare(args))
    assert (args.global_num_gpus, flags.hostfile, flags.master_addr) == (3, str(folder / "hosts"), "10.0.0.2")


@pytest.mark.parametrize(
    "hosts, values, word",
    [
        (None, dict(num_nodes=2), "num_nodes=2"),
        ("a slots=x\n", {}, "bad entry"),
        ("", {}, "empty"),
        ("a slots=2\n", dict(include="c"), "include=c"),
        ("a slots=2\n", dict(exclude="a"), "no device is left"),
        ("a slots=2\n", dict(num_gpus=4), "num_gpus=4"),
    ],
)
def test_faulty_hostfiles(folder, hosts, values, word):
    if hosts is not None:
        (folder / "hosts").write_text(hosts)
    (folder / "cluster.yml").write_text(json.dumps({**values, "hostfile": str(folder / "hosts")}))
    with pytest.raises(ConfigError, match=word):
        deepy(folder, "model", "cluster")


def test_a_hostfile_that_is_not_there_means_this_machine(folder, monkeypatch):
    """GPT-NeoX's own configurations name one that does not exist, and are meant to run on one machine."""
    (folder / "cluster.yml").write_text(json.dumps({"hostfile": "/mock_path", "num_gpus": 2}))
    with pytest.warns(UserWarning, match="hostfile=/mock_path.*this machine alone"):
        args = deepy(folder, "model", "cluster")
    assert args.global_num_gpus == 2
    flags = flags_of(launcher.prepare(args))
    assert (flags.num_gpus, flags.hostfile) == (2, "/mock_path")
    monkeypatch.setenv("DLTS_HOSTFILE", "/absent")
    with pytest.raises(ConfigError, match="DLTS_HOSTFILE=/absent"):
        deepy(folder, "model")


@pytest.mark.parametrize("values, word", [(dict(num_nodes=2), "num_nodes=2"), (dict(include="localhost:0"), "GPUs")])
def test_settings_that_need_more_than_this_machine(folder, values, word):
    (folder / "more.yml").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=word):
        deepy(folder, "model", "more")


SCRIPT = f"""
import os, signal, sys, time
sys.path.insert(0, {ROOT!r})
from megatron.entry import run_main
from megatron.neox_arguments import NeoXArgs

def say(line):
    os.write(1, (line + "\\n").encode())  # in one piece: print writes its parts one by one, and two ranks would mix

def save(*_):
    time.sleep(0.2)
    say("saved")
    sys.exit(0)

def main():
    args = NeoXArgs.consume_neox_args()
    args.configure_distributed_args()
    if args.user_script.endswith("exit.py") and args.rank == 1:
        sys.exit(7)
    signal.signal(signal.SIGTERM, save)
    say(f"rank {{args.rank}} of {{args.world_size}} head_dim {{args.head_dim}}")
    time.sleep(280)

run_main(main)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """deepy.py with two processes, started in two ways at once; each test waits for its own."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "model.yml").write_text(json.dumps(tiny_values(model_parallel_size=2, head_dim=24)))
    environment = {key: value for key, value in os.environ.items() if key not in RANKS}
    environment["DS_ACCELERATOR"] = "cpu"
    started = {}
    for mode in ("save", "exit"):
        (folder / f"{mode}.py").write_text(SCRIPT)
        command = [sys.executable, DEEPY, str(folder / f"{mode}.py"), str(folder / "model")]
        started[mode] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
    yield started
    for process in started.values():
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def test_every_rank_has_the_config_and_a_signal_lets_it_finish_its_work(runs):
    process = runs["save"]
    assert {process.stdout.readline() for _ in range(2)} == {f"rank {rank} of 2 head_dim 24\n" for rank in range(2)}
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM
    assert out == "saved\nsaved\n" and "Traceback" not in errors


def test_the_exit_code_of_a_failed_rank_is_deepys(runs):
    runs["exit"].communicate(timeout=250)
    assert runs["exit"].returncode == 7


@pytest.mark.parametrize("code, number", [(0, 0), (1, 0), (7, 0), (130, 0), (255, 0), (247, 9), (-9, 9), (245, 11)])
def test_a_fatal_signal_is_read_from_the_exit_code(code, number):
    assert launcher._fatal_signal(code) == number


def test_a_launcher_that_is_not_installed_is_an_error_not_a_traceback(folder, monkeypatch):
    def refuse(command):
        raise RuntimeError("launcher 'pdsh' not installed.")

    monkeypatch.setattr("deepspeed.launcher.runner.main", refuse)
    (folder / "multi.yml").write_text("force_multi: true")
    with pytest.raises(NeoXError, match="pdsh"):
        launcher.launch([str(folder / "script.py"), str(folder / "model"), str(folder / "multi")])


def test_a_config_error_is_printed_before_anything_starts(tmp_path):
    (tmp_path / "bad.yml").write_text(json.dumps({**tiny_values(), "head_dim": 0, "use_mup": True}))
    (tmp_path / "script.py").write_text("open('started', 'w')")
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, DEEPY, str(tmp_path / "script.py"), str(tmp_path / "bad")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert run.returncode == 1 and not (tmp_path / "started").exists() and time.monotonic() - start < 20
    assert run.stderr.startswith("error: 2 problems") and "head_dim=0" in run.stderr and "use_mup" in run.stderr
    assert "Traceback" not in run.stderr and run.stdout == ""


def test_megatron_config_survives_any_text():
    values = tiny_args(config_files={"a.yml": "x: 'ü' # \u2028\n"}).given()
    assert command_line.decode(command_line.encode(values)) == values
