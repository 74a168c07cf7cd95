"""Fixtures: a fake SLURM node, and a real SLURM on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from redline.launch.cluster import Cluster
from redline.launch.slurm import Job

SOURCE = Path(__file__).parents[2] / "src"
# Each pretended command writes down how it was called. srun also does what its turn in `plan` says.
PRETENDED = """#!%(python)s
import json, os, pathlib, sys
place = pathlib.Path(%(place)r)
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
watched = ("REDLINE_DEADLINE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG",
    "REDLINE_SUPERVISED", "REDLINE_RECOVERY")
also = json.loads((place / "also.json").read_text())
with open(place / "calls.jsonl", "a") as file:
    seen = {key: os.environ[key] for key in (*watched, *also) if key in os.environ}
    file.write(json.dumps([name, words, seen]) + "\\n")
if name == "scontrol" and words[0] == "show":
    print("first\\nsecond")
elif name == "scontrol":
    sys.exit(json.loads((place / "requeue.json").read_text()))
elif name == "squeue":
    print("2033-05-18T03:33:20" if words[-1] == "%%e" else (place / "state").read_text())
elif name == "sleep" and (place / "woken").exists():
    import signal
    (place / "woken").unlink()
    os.kill(os.getppid(), signal.SIGUSR1)
elif name == "srun":
    turns = json.loads((place / "plan.json").read_text())
    turn = turns.pop(0)
    (place / "plan.json").write_text(json.dumps(turns))
    run = pathlib.Path(words[words.index("--run" if "--run" in words else "--resume") + 1])
    for made in turn.get("makes", ()):
        (run / made).parent.mkdir(parents=True, exist_ok=True)
        (run / made).touch()
    for noted in turn.get("notes", ()):
        (run / noted).parent.mkdir(parents=True, exist_ok=True)
        with open(run / noted, "a") as file:
            file.write("a line\\n")
    if turn.get("woken"):
        (place / "woken").touch()
    if turn.get("state"):
        (place / "state").write_text(turn["state"])
    if turn.get("signal"):
        import signal, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(turn["code"]))
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(20)
        sys.exit(99)
    sys.exit(turn["code"])
"""


@dataclass
class Node:
    """Runs a script as SLURM would, with fake SLURM commands."""

    place: Path
    folder: Path
    calls: list[tuple[str, list[str], dict[str, str]]] = field(default_factory=list)

    def run(
        self, script: str, *turns: dict[str, Any], watch: tuple[str, ...] = (), requeues: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the script. `turns` say what the calls of srun do, in order: exit code and further actions."""
        (self.place / "plan.json").write_text(json.dumps(turns))
        (self.place / "also.json").write_text(json.dumps(watch))
        (self.place / "requeue.json").write_text(json.dumps(0 if requeues else 1))
        (self.place / "state").write_text("RUNNING")
        (self.place / "calls.jsonl").write_text("")
        given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "3", "TZ": "UTC"}
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        environment = {**kept, "PATH": f"{self.place / 'bin'}:/usr/bin:/bin", **given, **variables}
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60
        )
        self.calls = [json.loads(line) for line in (self.place / "calls.jsonl").read_text().splitlines()]
        return done

    def called(self, name: str) -> list[list[str]]:
        return [words for command, words, _ in self.calls if command == name]

    def trained(self) -> list[list[str]]:
        """Return the arguments of each call of `redline train`."""
        after = [words[words.index("train") + 1 :] for words in self.called("srun")]
        assert all(words[0] == "--supervise" for words in after)
        return [words[1:] for words in after]

    def environment(self) -> dict[str, str]:
        return next(seen for command, _, seen in self.calls if command == "srun")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    place, folder = tmp_path / "place", tmp_path / "folder"
    (place / "bin").mkdir(parents=True)
    folder.mkdir()
    for name in ("srun", "scontrol", "squeue", "sleep"):
        command = place / "bin" / name
        command.write_text(PRETENDED % {"python": f"{sys.executable} -S", "place": str(place)})
        command.chmod(0o755)
    return Node(place, folder)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    def make(*recipe: str, cluster: Cluster | None = None, **options: Any) -> Job:
        return Job(recipe or ("toy",), "toy", tmp_path, cluster or Cluster(), **options)

    return make


def require_slurm() -> None:
    missing = [
        name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(name, path=PATHS)
    ]
    if missing:
        pytest.skip(f"no SLURM here ({', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons are started as root, which this is not")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Any]:
    """Debian's slurm-wlm on the loopback interface of this machine."""
    require_slurm()
    from loopback import Slurm

    with Slurm() as running:
        yield running


@dataclass
class Launch:
    """`redline launch --submit`, in a folder whose name has characters that are special to a shell."""

    slurm: Any
    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "it's a $HOME"

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        own = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(self.home)}
        command = self.slurm.command(sys.executable, "-m", "redline", "launch", *words, "--submit", folder=self.folder)
        environment = {**self.slurm.environment, **own}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60)

    def number(self, *words: str) -> str:
        """Submit a job and return its number."""
        done = self(*words)
        assert done.returncode == 0, done.stderr
        found = re.fullmatch(r"job (\d+) submitted\n", done.stdout)
        assert found
        return found[1]

    def replace_python(self, task: str) -> Path:
        """Let the jobs run this script of bash instead of Python; return the file to which it writes."""
        folder = self.home / "redline" / "my env" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").write_text(task)
        (folder / "python").chmod(0o755)
        (folder / "activate").write_text(f'PATH="{folder}:$PATH"\n')
        (self.home / "redline" / "cluster.yaml").write_text(f"venv: {str(folder.parent)!r}\n")
        return self.folder / "tasks"


def make_launch(slurm: Any, home: Path) -> Launch:
    made = Launch(slurm, home)
    made.folder.mkdir()
    return made


@pytest.fixture
def launch(slurm: Any, tmp_path: Path) -> Launch:
    return make_launch(slurm, tmp_path)


@pytest.fixture
def launch_on_two(tmp_path: Path) -> Iterator[Callable[[int], Launch]]:
    """Start a SLURM of two nodes, which gives up a node after so many seconds."""
    from hosts import TwoHosts, why_no_hosts
    from loopback import Slurm

    require_slurm()
    if problem := why_no_hosts():
        pytest.skip(problem)
    with ExitStack() as stack:

        def start(patience: int) -> Launch:
            hosts = stack.enter_context(TwoHosts(tmp_path))
            return make_launch(stack.enter_context(Slurm(hosts, patience)), tmp_path)

        yield start


PATHS = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin"
