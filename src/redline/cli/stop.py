"""redline stop"""

from __future__ import annotations

import shlex

import typer

from redline.cli.options import RunArgument
from redline.errors import UserError
from redline.runs.summary import is_locked, run_without_checkpoint
from redline.vocabulary import STOP_REQUEST_FILE


def stop(run: RunArgument = "latest") -> None:
    """Ask a run to finish its step, save and stop.

    This works from any machine that shares the directory.

    Examples:
      redline stop latest
      redline stop runs/pretrain-350m-20261115-101500
    """
    path = run_without_checkpoint(run)
    if not is_locked(path):
        raise UserError("the run is not running.", where=str(path), fix="`redline runs` shows the status of every run.")
    try:
        (path / STOP_REQUEST_FILE).touch()
    except OSError as error:
        what = f"the folder cannot be written ({error.strerror})."
        raise UserError(what, where=str(path), fix="Ask the owner of the run to stop it.") from None
    typer.echo(f"asked {path} to save and stop; resume it later with: redline train --resume {shlex.quote(str(path))}")
