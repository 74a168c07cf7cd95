"""redline stop"""

from __future__ import annotations

import shlex

import typer

from redline.cli.options import RunArgument
from redline.cli.paths import whole_run


def stop(run: RunArgument = "latest") -> None:
    """Ask a run to finish its step, save and stop. Works across machines that share the directory.

    Examples:
      redline stop latest
      redline stop runs/pretrain-350m-20261115-101500
    """
    from redline.errors import UserError
    from redline.monitor.runs import is_locked, stop_request_path

    path = whole_run(run)
    if not is_locked(path):
        raise UserError("is not running.", where=str(path), fix="`redline runs` shows what is.")
    try:
        stop_request_path(path).touch()
    except OSError as error:
        fix = "Ask its owner to stop it."
        raise UserError(f"cannot be written ({error.strerror}).", where=str(path), fix=fix) from None
    typer.echo(f"asked {path} to save and stop; go on later with: redline train --resume {shlex.quote(str(path))}")
