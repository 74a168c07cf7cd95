"""SLURM jobs: the options and the script of a job, and its submission with sbatch."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.errors import UsageError, UserError
from redline.launch.cluster import Cluster
from redline.units import parse_hours

_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,3}):(\d{2}):(\d{2})")
_TIME_FIX = "Use, for example, 12:00:00, 2-00:00:00 (days-hours), 90m or 12h."
_MIN_SECONDS = 120  # SLURM counts in minutes and may send its signal up to one minute early


@dataclass(frozen=True)
class Job:
    recipe: tuple[str, ...]  # the recipe and its overrides
    name: str
    folder: Path  # working directory of the job: relative paths in the recipe start here
    cluster: Cluster
    nodes: int = 1
    ranks_per_node: int = 1
    on_gpus: bool = True
    cpus: int | None = None  # per rank; None: cluster.yaml's cpus_per_gpu with a GPU, else 1
    seconds: int | None = None  # wall time; None: the partition's default limit
    run: str | None = None  # None: runs/NAME-JOB
    sbatch: tuple[str, ...] = ()

    @property
    def notice(self) -> int:
        """Seconds before the time limit at which SLURM sends the signal to save: at most a quarter of the time."""
        return self.cluster.notice if self.seconds is None else min(self.cluster.notice, self.seconds // 4)

    @property
    def log(self) -> str:
        """Return the path of the log as a pattern of SLURM: %x is the name of the job, %j its number."""
        return "%x-%j.log" if self.cluster.logs is None else f"{self.cluster.logs.replace('%', '%%')}/%x-%j.log"

    def log_of(self, number: str) -> str:
        return self.log.replace("%x", self.name).replace("%j", number).replace("%%", "%")

    @property
    def options(self) -> list[str]:
        """Return the options of the #SBATCH lines."""
        site = self.cluster
        gpus = ":".join(part for part in (site.gpu_type, str(self.ranks_per_node)) if part)
        options = {
            "job-name": self.name,
            "account": site.account,
            "partition": site.partition,
            "qos": site.qos,
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            site.gpu_request: (f"gpu:{gpus}" if site.gpu_request == "gres" else gpus) if self.on_gpus else None,
            "cpus-per-task": self.cpus or (site.cpus_per_gpu if self.on_gpus else 1),
            "time": None if self.seconds is None else clock(self.seconds),
            "signal": f"B:USR1@{self.notice}",
            "open-mode": "append",
            "chdir": self.folder,
            "output": self.log,
        }
        return [*(f"--{name}={value}" for name, value in options.items() if value is not None), "--requeue"]

    @property
    def command(self) -> list[str]:
        """Return the command that starts Python on a node, in the container if there is one."""
        site = self.cluster
        if site.container is None:
            return ["python" if site.venv else sys.executable]
        if site.container.runtime == "pyxis":
            return [site.container.python]
        mounts = [word for mount in site.container.mounts for word in ("--bind", mount)]
        gpu_options = ["--nv"] if self.on_gpus else []
        return ["apptainer", "exec", *gpu_options, *mounts, site.container.image, site.container.python]

    @property
    def srun(self) -> list[str]:
        """Return the options of srun besides those of the job."""
        # Without it each rank might see only one GPU, and choosing it by the local rank would fail.
        words = ["--gpu-bind=none"] if self.on_gpus else []
        if self.nodes * self.ranks_per_node > 1:
            words.append("--label")
        container = self.cluster.container
        if container is not None and container.runtime == "pyxis":
            words.append(f"--container-image={container.image}")
            mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in (str(self.folder), *container.mounts)]
            words += [f"--container-mounts={','.join(mounts)}", f"--container-workdir={self.folder}"]
        return words

    def script(self) -> str:
        """Return the script for sbatch."""
        for value in (str(self.folder), self.run or ""):
            if not value.isprintable():
                fix = "Use a folder whose name has no control characters."
                raise UsageError(f"{value!r} cannot be written into a script for SLURM.", fix=fix)
        return _template().render(
            options=self.options,
            site_options=[*self.cluster.sbatch, *self.sbatch],
            modules=self.cluster.modules,
            venv=self.cluster.venv,
            setup=self.cluster.setup,
            environment=self.cluster.environment,
            gpus=self.on_gpus,
            nodes=self.nodes,
            notice=str(self.notice),
            name=self.name,
            run=self.run,
            recipe=self.recipe,
            command=self.command,
            srun=self.srun,
        )


class _Verbatim(str):
    """Text that is already valid bash. The template's escaping, which is meant for HTML, leaves it as it is."""

    def __html__(self) -> str:
        return str(self)


def _quoted(value: Any) -> _Verbatim:
    """Quote a value as one word of bash. The template passes every value through this function."""
    return value if isinstance(value, _Verbatim) else _Verbatim(_word(str(value)))


def _word(text: str) -> str:
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and "," in text else quoted  # quoted, or readers take the comma for a typo


def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_quoted,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters |= {"verbatim": _Verbatim, "words": lambda words: _Verbatim(" ".join(map(_word, words)))}
    return jinja.get_template("script.sh.j2")


def job_name(recipe: str) -> str:
    """Return the name of a recipe as one word of letters, digits and ._+-"""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", recipe).strip("-.") or "redline"


def parse_time(text: str) -> int:
    """Return 12:00:00 or 12h in seconds. A bare 12 is refused: SLURM reads it as minutes, people as hours."""
    clock_form = _CLOCK.fullmatch(text.strip())
    if clock_form:
        days, hours, minutes, seconds = (int(part or 0) for part in clock_form.groups())
        total = float(((24 * days + hours) * 60 + minutes) * 60 + seconds)
    else:
        try:
            total = 3600 * parse_hours(text)
        except ValueError:
            total = 0.0
        if not text.strip()[-1:].isalpha():
            total = 0.0
    if not total:
        raise UsageError(f"{text!r} is not a time with a unit.", where="--time", fix=_TIME_FIX)
    if total < _MIN_SECONDS:
        fix = "Use at least two minutes, so that the job can also save."
        raise UsageError(f"{text!r} is too short.", where="--time", fix=fix)
    return round(total)


def clock(seconds: int) -> str:
    """Return seconds in SLURM's format: 129600 → 1-12:00:00."""
    days, remainder = divmod(seconds, 86400)
    hours, minutes = remainder // 3600, remainder // 60 % 60
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes:02d}:{remainder % 60:02d}"


# ----------------------------------------------------------------------------------------------------
# Submission.


_SUBMIT_TIMEOUT_S = 120  # a busy controller answers slowly


def submit(script: str, logs: Path | None = None) -> str:
    """Submit the script and return the job's number. Raise UserError with SLURM's message if it refuses."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        fix = "Use a login node; or leave out --submit, save the script, and submit it there with sbatch."
        raise UserError("sbatch is not installed on this machine.", where="--submit", fix=fix)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)  # SLURM does not create it; the job would end without any log
    try:
        done = subprocess.run(
            [sbatch, "--parsable"], input=script, capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        fix = "Check with squeue whether the job exists before you try again."
        raise UserError(f"sbatch did not answer within {_SUBMIT_TIMEOUT_S} s.", where="--submit", fix=fix) from None
    if done.returncode:
        reason = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        fix = "Change the options or cluster.yaml; `sinfo` lists the partitions."
        raise UserError(f"SLURM refuses the job: {reason.rstrip('.')}.", where="sbatch", fix=fix)
    return done.stdout.strip().partition(";")[0]  # JOB;CLUSTER if there are several clusters
