"""A job for SLURM: what is asked for, and the script that asks for it."""

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
_EXAMPLES = "Write 12:00:00, 2-00:00:00 (days first), 90m or 12h."
_SHORTEST = 120  # seconds; SLURM counts in minutes, and tells up to one too early


@dataclass(frozen=True)
class Job:
    recipe: tuple[str, ...]  # the recipe and its overrides
    name: str
    folder: Path  # where the job runs: what the recipe names is found from there
    cluster: Cluster
    nodes: int = 1
    ranks_per_node: int = 1
    on_gpus: bool = True
    cpus: int | None = None  # of each rank; None: the cluster's beside a GPU, else one
    seconds: int | None = None  # of wall time; None: the partition's own limit
    run: str | None = None  # None: runs/NAME-JOB
    sbatch: tuple[str, ...] = ()

    @property
    def notice(self) -> int:
        """Seconds before the limit at which SLURM asks to save: never more than a quarter of all the time."""
        return self.cluster.notice if self.seconds is None else min(self.cluster.notice, self.seconds // 4)

    @property
    def log(self) -> str:
        """In SLURM's words: %x is the job's name, %j its number."""
        return "%x-%j.log" if self.cluster.logs is None else f"{self.cluster.logs.replace('%', '%%')}/%x-%j.log"

    def log_of(self, number: str) -> str:
        return self.log.replace("%x", self.name).replace("%j", number).replace("%%", "%")

    @property
    def options(self) -> list[str]:
        """What stands in the #SBATCH lines."""
        site = self.cluster
        cards = ":".join(part for part in (site.gpu_type, str(self.ranks_per_node)) if part)
        asked = {
            "job-name": self.name,
            "account": site.account,
            "partition": site.partition,
            "qos": site.qos,
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            site.gpu_request: (f"gpu:{cards}" if site.gpu_request == "gres" else cards) if self.on_gpus else None,
            "cpus-per-task": self.cpus or (site.cpus_per_gpu if self.on_gpus else 1),
            "time": None if self.seconds is None else clock(self.seconds),
            "signal": f"B:USR1@{self.notice}",
            "open-mode": "append",
            "chdir": self.folder,
            "output": self.log,
        }
        return [*(f"--{name}={value}" for name, value in asked.items() if value is not None), "--requeue"]

    @property
    def command(self) -> list[str]:
        """Python, where the ranks find redline."""
        site = self.cluster
        if site.container is None:
            return ["python" if site.venv else sys.executable]
        if site.container.runtime == "pyxis":
            return [site.container.python]
        mounts = [word for mount in site.container.mounts for word in ("--bind", mount)]
        cards = ["--nv"] if self.on_gpus else []
        return ["apptainer", "exec", *cards, *mounts, site.container.image, site.container.python]

    @property
    def srun(self) -> list[str]:
        """What srun is told beyond the job's own options."""
        words = ["--gpu-bind=none"] if self.on_gpus else []  # a rank takes its card by its number on the node
        if self.nodes * self.ranks_per_node > 1:
            words.append("--label")
        box = self.cluster.container
        if box is not None and box.runtime == "pyxis":
            words.append(f"--container-image={box.image}")
            mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in (str(self.folder), *box.mounts)]
            words += [f"--container-mounts={','.join(mounts)}", f"--container-workdir={self.folder}"]
        return words

    def script(self) -> str:
        for value in (str(self.folder), self.run or ""):
            if not value.isprintable():
                fix = "Use a folder whose name is one line of text."
                raise UsageError(f"{value!r} cannot stand in a script for SLURM.", fix=fix)
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
    """Text that is bash already; the template's own escaping, which is for HTML, leaves it alone."""

    def __html__(self) -> str:
        return str(self)


def _quoted(value: Any) -> _Verbatim:
    """Every value that is put into the script passes here: one word of bash, whatever it holds."""
    return value if isinstance(value, _Verbatim) else _Verbatim(_word(str(value)))


def _word(text: str) -> str:
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and "," in text else quoted  # in a list, readers take a comma for a slip


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
    """A recipe's name as one plain word."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", recipe).strip("-.") or "redline"


def parse_time(text: str) -> int:
    """12:00:00 or 12h → seconds. SLURM reads a bare 12 as minutes, people as hours: it is refused."""
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
        raise UsageError(f"{text!r} is not a time that is read the same by all.", where="--time", fix=_EXAMPLES)
    if total < _SHORTEST:
        fix = "Give it two minutes at least: it must also be able to save."
        raise UsageError(f"{text!r} is too short.", where="--time", fix=fix)
    return round(total)


def clock(seconds: int) -> str:
    """129600 → 1-12:00:00"""
    days, rest = divmod(seconds, 86400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"


# ----------------------------------------------------------------------------------------------------
# Handing a script to SLURM.


_PATIENCE_S = 120  # a busy controller answers late


def submit(script: str, logs: Path | None = None) -> str:
    """The number of the job; where SLURM refuses, its own words."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        fix = "Go to a node that submits jobs; or leave out --submit, save the script, and sbatch it there."
        raise UserError("there is no sbatch here.", where="--submit", fix=fix)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)  # SLURM does not, and the job would end without a word
    try:
        done = subprocess.run(
            [sbatch, "--parsable"], input=script, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        fix = "Look with squeue whether it is there before you try again."
        raise UserError(f"sbatch did not answer within {_PATIENCE_S} s.", where="--submit", fix=fix) from None
    if done.returncode:
        said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        fix = "`sinfo` lists the partitions; options and cluster.yaml say what is asked for."
        raise UserError(f"SLURM refuses: {said.rstrip('.')}.", where="sbatch", fix=fix)
    return done.stdout.strip().partition(";")[0]  # JOB;CLUSTER, where there are several
