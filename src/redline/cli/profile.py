"""redline profile"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from redline.cli.options import JsonOption, RecipeArgument, split_words
from redline.errors import UsageError
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from redline.launch.profile import StepProfile

_BAR = 20


def profile(
    recipe: RecipeArgument = None,
    steps: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Number of recorded steps.")] = 3,
    wait: Annotated[
        int, typer.Option(min=0, max=1000, metavar="N", help="Steps to run first, without the profiler.")
    ] = 2,
    warmup: Annotated[
        int, typer.Option(min=0, max=100, metavar="N", help="Steps after those that the profiler discards.")
    ] = 1,
    record_shapes: Annotated[
        bool, typer.Option("--record-shapes", help="Record the shapes of operands in the trace.")
    ] = False,
    profile_memory: Annotated[
        bool, typer.Option("--profile-memory", help="Record every allocation in the trace (slower).")
    ] = False,
    with_stack: Annotated[
        bool, typer.Option("--with-stack", help="Record Python call stacks in the trace (much slower).")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="A new folder for the result. Default: runs/profiles/RECIPE-DATE-TIME."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Measure where the time and memory of a training step go.

    Prints a table, and writes a trace for Perfetto or TensorBoard.

    Examples:
      redline profile quickstart
      redline profile pretrain-350m data.source=./tokens train.precision=fp8 --steps 5
      redline profile quickstart --wait 1 --warmup 1 --steps 3 --record-shapes --profile-memory --with-stack
    """
    from redline.cli.progress import PreparationBar
    from redline.launch.profile import profile_recipe
    from redline.recipe.load import load

    name, overrides = split_words(recipe, "profile")
    loaded = load(name or "quickstart", overrides)
    folder = out or RUNS / "profiles" / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("the folder is not empty.", where=str(folder), fix="Choose another --out.")
    with _new_folder(folder):
        recording = {"active": steps, "wait": wait, "warmup": warmup, "record_shapes": record_shapes}
        recording |= {"profile_memory": profile_memory, "with_stack": with_stack}
        result = profile_recipe(
            loaded, recording, folder, preparation=PreparationBar(), on_step=_show_progress, log=_log
        )
    typer.echo(json.dumps(result.record()) if json_ else "\n".join(_lines(result)))


def _log(text: str) -> None:
    typer.echo(text, err=True)


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Create the folder and check that it can be written before anything is measured; remove it if it stays empty."""
    from redline.cache import explain_write_errors

    new = [path for path in (folder, *folder.parents) if not path.exists()]
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # an existing folder may be read-only
    try:
        yield
    finally:
        with suppress(OSError):
            for path in new:
                path.rmdir()


def _lines(result: StepProfile) -> list[str]:
    parts = result.parts
    lines = [
        f"{result.name}: {parts.step_ms:,.1f} ms per step over {parts.steps} steps, "
        f"of which {parts.data_wait_ms:.2f} ms waiting for data",
        "",
        f"  {'':14}{'ms':>9}  {'share':>6}  {'':{_BAR}}  of the best known",
    ]
    for part in parts.parts:
        bar = "━" * max(1, round(_BAR * part.share)) if part.share >= 0.005 else ""
        near = f"{part.of_best:>5.0%}  " if part.of_best else " " * 7
        lines.append(f"  {part.kind:14}{part.ms:>9,.1f}  {part.share:>6.1%}  {bar:{_BAR}}  {near}{part.advice}")
    lines += ["", "  longest kernels"]
    lines += [
        f"  {kernel.ms:>9,.2f} ms  {kernel.calls:>6.0f}×  {kernel.kind:13} {_shortened(kernel.name)}"
        for kernel in parts.longest
    ]
    if result.memory is not None:
        lines += ["", f"  {result.memory.peak_bytes / 2**30:.1f} GiB at the peak, by the code that allocated it"]
        lines += [
            f"  {holder.bytes / 2**30:>9.2f} GiB {holder.tensors:>6}×  {holder.where}"
            for holder in result.memory.holders
        ]
    lines += [
        "",
        *(f"  {path}" for path in result.files),
        "  A trace opens in Perfetto (ui.perfetto.dev) or TensorBoard.",
    ]
    return lines


def _shortened(name: str, most: int = 90) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _show_progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\rstep {done} of {of}" + ("\n" if done == of else ""), nl=False, err=True)
