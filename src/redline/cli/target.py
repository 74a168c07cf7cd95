"""Where `redline train` writes: --run, --continue and --resume, in every spelling.

Launchers read options, too. torchrun's argparse takes `--run` for an abbreviation of its own `--run-path`, although it
stands behind the module's name ("ambiguous option", Python 3.11). Words of the form key=value pass through every
launcher, and so does the environment: `run=DIR continue=true` and REDLINE_RUN=DIR REDLINE_CONTINUE=1 mean the same as
`--run DIR --continue`. The command line wins over the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.errors import UsageError

RUN_VARIABLE, CONTINUE_VARIABLE = "REDLINE_RUN", "REDLINE_CONTINUE"
RESTARTS, MOST_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"  # which torchrun sets
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
CONTINUED = "run=DIR continue=true"


@dataclass(frozen=True)
class Target:
    run: Path | None = None
    resume: str | None = None
    continued: bool = False  # start a run in `run`, or resume the one that it holds


def read_target(
    words: Sequence[str], given: Target, environment: Mapping[str, str], *, sweep: bool = False
) -> tuple[Target, list[str]]:
    """Return the target, and the words that are not about it. `given` is what the options say."""
    values: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if "=" not in word or key not in ("run", "resume", "continue"):
            rest.append(word)
        elif key in values or {"run": given.run, "resume": given.resume, "continue": given.continued}[key]:
            raise UsageError("is given twice.", where=key, fix=f"Write --{key} or {key}=, once.")
        elif not value:
            raise UsageError("has no value.", where=word, fix="Write run=DIR, resume=RUN or continue=true.")
        else:
            values[key] = value
    run = Path(values["run"]) if "run" in values else given.run
    resume = values.get("resume", given.resume)
    continued = given.continued or is_true(values.get("continue", ""), "continue")
    if continued and (resume is not None or sweep):
        what = "--resume names a run that exists" if resume is not None else "a sweep continues by itself"
        raise UsageError(f"{what}; --continue is for one run that may not exist yet.", fix="Leave out --continue.")
    if resume is None and not sweep and "continue" not in values:
        continued = continued or is_true(environment.get(CONTINUE_VARIABLE, ""), CONTINUE_VARIABLE)
    if resume is None and run is None and environment.get(RUN_VARIABLE):
        run = Path(environment[RUN_VARIABLE])
    if continued and run is None:
        fix = f"Write --run DIR, run=DIR, or set {RUN_VARIABLE}=DIR."
        raise UsageError("--continue needs the directory that it starts or resumes.", fix=fix)
    return Target(run, resume, continued), rest


def is_true(text: str, where: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"{text!r} is neither true nor false.", where=where, fix="Write 1 or true, 0 or false.")
    return text.lower() in _TRUE


def restart_warning(target: Target, environment: Mapping[str, str]) -> str | None:
    """Return what to warn of where torchrun may restart the ranks; refuse a restart that would begin a second run."""
    if target.continued or target.resume is not None:
        return None
    count, most = (_count(environment.get(name, "")) for name in (RESTARTS, MOST_RESTARTS))
    if count and target.run is None:
        what = f"torchrun has restarted these ranks (restart {count}); they would begin a second run."
        raise UsageError(what, where=RESTARTS, fix=f"Start torchrun with {CONTINUED}: a restart then resumes the run.")
    if most and not count and environment.get("RANK") == "0":
        return (
            f"torchrun restarts these ranks up to {most} times; {CONTINUED} is needed for a restart to resume the run"
        )
    return None


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
