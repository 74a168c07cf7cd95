"""Settings for all jobs of a cluster: `~/.config/redline/cluster.yaml`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError

from redline.errors import Problem, RecipeError, UsageError, did_you_mean
from redline.fields import Count, Section, one_of
from redline.recipe.load import read_recipe

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=| |$)")
# sbatch options that `redline launch` sets itself. Another value would contradict other lines of the script.
_RESERVED_OPTIONS = frozenset(
    (
        *("array", "chdir", "cpus-per-task", "job-name", "nodes", "no-requeue", "ntasks", "ntasks-per-gpu"),
        *("ntasks-per-node", "open-mode", "output", "requeue", "signal", "time", "wrap"),
        *("gpus", "gpus-per-node", "gpus-per-task", "gres"),
    )
)


def one_line(value: Any) -> str:
    """Return a text without line breaks and control characters, which could add lines to the script."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text. Put it in quotes.")
    if not value.strip() or _CONTROL.search(value):
        raise ValueError(f"{value!r} is not one line of text.")
    return value


def sbatch_option(value: Any) -> str:
    """Return an option as it is written after #SBATCH."""
    line = one_line(value)
    match = _OPTION.match(line)
    if not match:
        raise ValueError(f"{line!r} is not an option of sbatch: write it as --name=value.")
    if match[1] in _RESERVED_OPTIONS:
        raise ValueError(f"--{match[1]} is set by `redline launch` itself; see its --help.")
    return line


def _lines(rule: Any) -> BeforeValidator:
    def check(value: Any) -> tuple[str, ...]:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(rule(item) for item in items)

    return BeforeValidator(check)


def _maybe_line(value: Any) -> str | None:
    return None if value is None else one_line(value)


def _folder(value: Any) -> str | None:
    """Return a path with ~ expanded, because bash does not expand it within quotes."""
    return None if value is None else str(Path(one_line(value)).expanduser())


def _environment(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping of NAME: value.")
    for name, text in value.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name of an environment variable.")
        if isinstance(text, bool) or not isinstance(text, str | int | float):
            raise ValueError(f"{name}: {text!r} is not a text or a number.")
    return tuple((name, one_line(str(text)) if text != "" else "") for name, text in value.items())


def _labels(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping of LABEL: value.")
    return tuple((one_line(name), one_line(text)) for name, text in value.items())


Line = Annotated[str, BeforeValidator(one_line)]
MaybeLine = Annotated[str | None, BeforeValidator(_maybe_line)]
Folder = Annotated[str | None, BeforeValidator(_folder)]
Lines = Annotated[tuple[str, ...], _lines(one_line)]


class Container(Section):
    """The container in which the ranks run. redline must be installed in it."""

    image: Line
    runtime: Annotated[str, one_of("apptainer", "pyxis")] = "apptainer"
    mounts: Lines = ()  # FOLDER or FOLDER:TARGET
    python: Line = "python3"


class Kubernetes(Section):
    """For `redline launch --to k8s`. The options of the command take precedence."""

    image: MaybeLine = None
    volume: MaybeLine = None  # CLAIM:/PATH
    namespace: MaybeLine = None
    secret: MaybeLine = None  # its entries become environment variables, for example the keys of a bucket
    service_account: MaybeLine = None
    node_selector: Annotated[tuple[tuple[str, str], ...], BeforeValidator(_labels)] = ()  # LABEL: value


class SkyPilot(Section):
    """For `redline launch --to skypilot`. The options of the command take precedence."""

    image: MaybeLine = None
    volume: MaybeLine = None  # VOLUME:/PATH
    infra: MaybeLine = None  # for example aws/us-east-1


class Cluster(Section):
    account: MaybeLine = None
    partition: MaybeLine = None  # --partition takes precedence
    qos: MaybeLine = None
    gpu_type: MaybeLine = None  # for example h100, for --gpus-per-node=h100:8
    gpu_request: Annotated[str, one_of("gpus-per-node", "gres")] = "gpus-per-node"
    cpus_per_gpu: Count = 8
    notice: Count = 300  # seconds before the time limit at which SLURM sends the signal to save
    logs: Folder = None  # default: the folder from which the job is submitted
    modules: Lines = ()
    venv: Folder = None  # default: the Python that runs `redline launch`
    container: Container | None = None
    environment: Annotated[tuple[tuple[str, str], ...], BeforeValidator(_environment)] = ()  # NAME: value
    setup: Lines = ()  # lines of bash to run first
    sbatch: Annotated[tuple[str, ...], _lines(sbatch_option)] = ()
    kubernetes: Kubernetes = Kubernetes()
    skypilot: SkyPilot = SkyPilot()


_SECTIONS: dict[str, type[Section]] = {"container": Container, "kubernetes": Kubernetes, "skypilot": SkyPilot}


def cluster_file() -> Path:
    """Return $XDG_CONFIG_HOME/redline/cluster.yaml; the default of that variable is ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".config") / "redline" / "cluster.yaml"


def read_cluster(path: Path | None = None) -> Cluster:
    """Read the settings; return the defaults if there is no file. Raise UsageError if `path` is given but missing."""
    file = path or cluster_file()
    if not file.is_file():
        if path is not None:
            raise UsageError("there is no such file.", where=str(path), fix="Check the path, or leave it out.")
        return Cluster()
    try:
        return Cluster.model_validate(read_recipe(file, "partition: NAME"))
    except ValidationError as error:
        raise RecipeError(str(file), [_problem(detail) for detail in error.errors()]) from None


def _problem(error: Any) -> Problem:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        schema = _SECTIONS[str(error["loc"][0])] if len(error["loc"]) > 1 else Cluster
        known = list(schema.model_fields)
        hint = did_you_mean(str(error["loc"][-1]), known) or f"Known keys: {', '.join(known)}."
        return Problem(key, "is not a key of this file.", hint)
    if error["type"] == "missing":
        return Problem(key, "is missing.", "Set it.")
    if error["type"] in ("model_type", "model_attributes_type"):
        return Problem(key, f"is a mapping of keys, not {error['input']!r}.", f"Use, for example, {key}: {{image: …}}.")
    return Problem(key, str(error.get("ctx", {}).get("error") or error["msg"]))
