"""The `redline` command: one lazy file per verb."""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from redline import __version__
from redline.cache import IrregularFileError
from redline.cli import (
    bench,
    completion,
    doctor,
    evaluate,
    export,
    launch,
    plan,
    prepare,
    profile,
    recipes,
    report,
    runs,
    train,
    watch,
)
from redline.cli import (
    evaluate as sample,
)
from redline.cli import (
    runs as stop,
)
from redline.cli.suggestions import Verbs
from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError, redact

_BY_DEFAULT = signal.default_int_handler

app = typer.Typer(
    name="redline",
    cls=Verbs,
    help="Train language models at the limit of the hardware, and know what that limit is.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"redline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    if context.invoked_subcommand is None:
        from redline.cli.greeting import greet

        greet()


app.command("prepare")(prepare.prepare)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("launch")(launch.launch)
app.command("profile")(profile.profile)
app.command("doctor")(doctor.doctor)
app.command("recipes")(recipes.recipes)
app.add_typer(runs.app, name="runs")
app.command("stop")(stop.stop)
app.command("sample")(sample.sample)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.add_typer(bench.app, name="bench")
app.command("completion")(completion.completion)


def main() -> None:
    """Run the command line and end the process."""
    exit_process(run())


def run(command: typer.Typer | None = None) -> int:
    """Run the command line (redline's, unless another app is given) and return its exit code."""
    _open_streams()
    # Threads that wait should spin for a moment, not for ever: see docs/decisions/0003-cpu-threads.md.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for plugins costs more than using none
    if not sys.stdout.isatty() and "FORCE_COLOR" not in os.environ:
        os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")  # else its help is coloured for a pipe in some CI
    _settle_streams_and_interrupts()
    try:
        _refuse_nowhere()
        (command or app)()
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except UserError as error:
        sys.stderr.write(redact(f"redline: {error.message()}\n"))
        return error.exit_code
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:
        sys.stderr.write(redact(_refused(error) or traceback.format_exc()))
        return EXIT_FAILED
    return EXIT_DONE


def exit_process(code: int) -> NoReturn:
    """End the process with `code`, without finalising the interpreter if it was one rank of several.

    A gloo worker thread may still be releasing the last collective: FSDP's device mesh keeps the process group alive,
    so `destroy_process_group` does not join it. If Python finalises meanwhile, CPython ends that thread with
    `pthread_exit` inside a noexcept destructor, and the whole process aborts after a run that finished.
    """
    if "RANK" in os.environ and "torch.distributed" in sys.modules:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a pipe whose reader is gone, or a closed stream
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _open_streams() -> None:
    """Whoever closed one of the three wants to hear nothing there; else the next file that is opened would be it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _refuse_nowhere() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder that this was called in is gone.", fix="Go to another: cd.") from None


def _settle_streams_and_interrupts() -> None:
    """What an encoding has no letter for is a `?`; and Ctrl-C is heard at any time."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _BY_DEFAULT:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """While torch is imported it imports numpy, and what is raised in there is dropped: numpy would stay a half."""
    modules = [sys.modules.get(name) for name in ("torch", "numpy")]
    if any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules):
        os._exit(EXIT_INTERRUPTED)  # nothing is written yet
    _BY_DEFAULT(number, frame)


def _refused(error: Exception) -> str | None:
    """What the disk refuses, and a home that is none. Anything else is a mistake of ours: all there is to know is
    shown, but for secrets."""
    if isinstance(error, RuntimeError) and str(error) == "Could not determine home directory.":
        return "redline: nobody's home is known by that name, or by none: write paths without ~, or set HOME.\n"
    if not isinstance(error, OSError):
        return None
    if isinstance(error, IrregularFileError):
        return f"redline: {error.filename}: {error.strerror}. Remove it, or put the original file back.\n"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = "Raise the limit (ulimit -f)" if error.errno == errno.EFBIG else "Free some and try again"
        return f"redline: {error.filename or 'output'}: {error.strerror}. {fix}.\n"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename:
        return f"redline: {error.filename}: {error.strerror}. Change who may use it, or name another place.\n"
    return None
