"""The `redline` command: registers the verbs, runs one, and turns exceptions into messages and exit codes."""

from __future__ import annotations

import atexit
import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from redline import __version__
from redline.cache import IrregularFileError
from redline.cli import (
    bench,
    chat,
    completion,
    doctor,
    evaluate,
    export,
    keys,
    launch,
    plan,
    play,
    prepare,
    profile,
    recipes,
    report,
    runs,
    sample,
    train,
    watch,
)
from redline.cli.help import VerbCommand
from redline.cli.suggestions import Verbs
from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError, missing_torch, redact

app = typer.Typer(
    name="redline",
    cls=Verbs,
    invoke_without_command=True,
    add_completion=False,  # `redline completion` prints the script
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"redline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Train language models at the limit of the hardware, and know what that limit is.

    Examples:
      redline plan pretrain-350m --gpu h100
      redline train quickstart
      redline report latest
    """
    if context.invoked_subcommand is None:
        from redline.cli.greeting import greet

        greet()


def _register(heading: str, **verbs: Callable[..., None] | typer.Typer) -> None:
    """Register verbs, to be listed under `heading` in `redline --help`."""
    for name, verb in verbs.items():
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name, rich_help_panel=heading)
        else:
            app.command(name, cls=VerbCommand, rich_help_panel=heading)(verb)


_register("Data", prepare=prepare.prepare)
_register("Plan", recipes=recipes.recipes, keys=keys.keys, plan=plan.plan)
_register("Train", train=train.train, launch=launch.launch, stop=runs.stop)
_register("Inspect", runs=runs.app, watch=watch.watch, report=report.report, profile=profile.profile)
_register("Use", eval=evaluate.evaluate, sample=sample.sample, chat=chat.chat, play=play.play, export=export.export)
_register("Machine", doctor=doctor.doctor, bench=bench.app, completion=completion.completion)


def main() -> None:
    """Run the command line and end the process."""
    exit_process(run())


def run(command: typer.Typer | None = None) -> int:
    """Run the command line (redline's, unless another app is given) and return its exit code."""
    _replace_closed_streams()
    # OpenMP threads should spin for a moment, not for ever: see docs/decisions/0003-cpu-threads.md.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Searching the installed packages for pydantic plugins would slow every command down.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if not sys.stdout.isatty() and "FORCE_COLOR" not in os.environ:
        # Some CI variables make typer colour its output even when it goes into a pipe.
        os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")
    _escape_unencodable_output()
    _install_interrupt_handler()
    try:
        _check_working_directory()
        if completion.COMPLETE_VARIABLE in os.environ:
            completion.enable()
        # The name is fixed because usage lines, and the variable that asks for completions, contain it.
        command() if command else app(prog_name="redline")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except UserError as error:
        sys.stderr.write(redact(f"redline: {error.message()}\n"))
        return error.exit_code
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:
        # Any other exception is a bug: print its traceback, without secrets.
        sys.stderr.write(redact(_environment_problem(error) or traceback.format_exc()))
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


def _replace_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed.

    Otherwise the next file to be opened would get its descriptor, and receive what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _check_working_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder does not exist any more.", fix="Change to another one with cd.") from None


def _escape_unencodable_output() -> None:
    """Print `?` for characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def _install_interrupt_handler() -> None:
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: raise KeyboardInterrupt, but leave at once while torch or numpy is being imported.

    torch imports numpy and ignores every exception in there, so it would go on with half a numpy.
    """
    modules = [sys.modules.get(name) for name in ("torch", "numpy")]
    if any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in modules):
        os._exit(EXIT_INTERRUPTED)  # nothing is written yet
    signal.default_int_handler(number, frame)


def _environment_problem(error: Exception) -> str | None:
    """Return a message for an error that the machine causes: no torch, no home directory, a full disk, …"""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return f"redline: {missing_torch().message()}\n"
    if isinstance(error, RuntimeError) and str(error) == "Could not determine home directory.":
        return "redline: cannot determine the home directory. Set HOME, or use paths without ~.\n"
    if not isinstance(error, OSError):
        return None
    if isinstance(error, IrregularFileError):
        return f"redline: {error.filename}: {error.strerror}. Remove it, or put the original file back.\n"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = "Raise the limit (ulimit -f)" if error.errno == errno.EFBIG else "Free some space and try again"
        return f"redline: {error.filename or 'output'}: {error.strerror}. {fix}.\n"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename:
        return f"redline: {error.filename}: {error.strerror}. Change its permissions, or use another path.\n"
    return None
