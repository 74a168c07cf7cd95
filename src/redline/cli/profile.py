"""redline profile"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.options import JsonOption, RecipeArgument, split_words
from redline.errors import UsageError
from redline.vocabulary import RUNS

if TYPE_CHECKING:
    from redline.recipe.load import Loaded
    from redline.recipe.resolve import Resolved
    from redline.runs.breakdown import Breakdown, MemoryHistory

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
    from redline.recipe.load import load

    name, overrides = split_words(recipe, "profile")
    loaded = load(name or "quickstart", overrides)
    folder = out or RUNS / "profiles" / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("the folder is not empty.", where=str(folder), fix="Choose another --out.")
    with _new_folder(folder):
        recording = {"active": steps, "wait": wait, "warmup": warmup, "record_shapes": record_shapes}
        recording |= {"profile_memory": profile_memory, "with_stack": with_stack}
        result = _profile(loaded, recording, folder)
    typer.echo(json.dumps(result.record) if json_ else "\n".join(result.lines()))


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


class _Result:
    """What was measured, as JSON and as lines of text."""

    def __init__(
        self, name: str, parts: Breakdown, memory: MemoryHistory | None, peak: float | None, files: list[Path]
    ):
        self.name, self.parts, self.memory, self.peak, self.files = name, parts, memory, peak, files

    @property
    def record(self) -> dict[str, Any]:
        memory = None if self.memory is None else self.memory.data()
        return {"recipe": self.name, **self.parts.data(), "peak_memory_gib": self.peak, "memory": memory}

    def lines(self) -> list[str]:
        parts = self.parts
        lines = [
            f"{self.name}: {parts.step_ms:,.1f} ms per step over {parts.steps} steps, "
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
            f"  {one.ms:>9,.2f} ms  {one.calls:>6.0f}×  {one.kind:13} {_shortened(one.name)}" for one in parts.longest
        ]
        if self.memory is not None:
            lines += ["", f"  {self.memory.peak_bytes / 2**30:.1f} GiB at the peak, by the code that allocated it"]
            lines += [f"  {one.bytes / 2**30:>9.2f} GiB {one.tensors:>6}×  {one.where}" for one in self.memory.holders]
        lines += [
            "",
            *(f"  {path}" for path in self.files),
            "  A trace opens in Perfetto (ui.perfetto.dev) or TensorBoard.",
        ]
        return lines


def _shortened(name: str, most: int = 90) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _profile(loaded: Loaded, options: dict[str, Any], folder: Path) -> _Result:
    """Train a few steps under the profiler, and write profile.json and the trace into the folder."""
    from redline.launch.start import set_environment

    set_environment(loaded.recipe)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler's messages about starting and stopping
    from redline.cache import write_atomically
    from redline.cli.progress import PreparationBar
    from redline.hardware.probe import detect_machine
    from redline.jobs.objective import job_runtime
    from redline.recipe.resolve import resolve
    from redline.runs.breakdown import breakdown
    from redline.training.profiling import Recording, memory_recorded, profiled
    from redline.training.step_log import peak_memory_gib
    from redline.training.trial import SilentView, trainer_without_run

    recording = Recording(**options)

    def log(text: str) -> None:
        typer.echo(text, err=True)

    runtime = job_runtime(loaded.recipe.objective)
    recipe = runtime.complete(loaded.recipe, log)
    with PreparationBar() as bar:
        data = runtime.load_data(recipe, progress=bar)
    resolved = resolve(recipe, detect_machine(recipe.train.device), data.facts)
    resolved = replace(
        resolved, horizon_steps=recording.steps
    )  # data that a teacher model generates are made for these steps only
    objective = runtime.create(resolved, data)
    trace = folder / f"{loaded.name}.pt.trace.json.gz"
    with trainer_without_run(resolved, objective, SilentView()) as trainer:
        with memory_recorded(trainer.device) as recorded:
            log("building and warming up")
            trainer.build()
            trainer.warm_up()
            measured = profiled(trainer, recording, trace, lambda done: _show_progress(done, recording.steps))
            memory = recorded()
        peak = peak_memory_gib(trainer.device)
    parts = breakdown(
        measured.spans,
        steps=recording.active,
        seconds=measured.seconds,
        busy=measured.busy,
        data_wait=measured.data_wait,
        best=_best(resolved),
        gpu=trainer.device.type == "cuda",
    )
    files = [folder / "profile.json", trace]
    result = _Result(loaded.name, parts, memory, peak, files)
    write_atomically(files[0], json.dumps(result.record, indent=1) + "\n")
    return result


def _best(resolved: Resolved) -> dict[str, float]:
    """Return the planned milliseconds per kind of work at the best known rates; on a CPU only those of matmuls."""
    from redline.recipe.forecast import step_work
    from redline.runs.breakdown import MATMUL
    from redline.runs.roofline import limits_ms

    best = limits_ms({"type": "plan", **resolved.plan_event()}, "ms_per_step")
    if not best and resolved.machine.cpu_flops:
        best[MATMUL] = 1e3 * resolved.tokens_per_step * step_work(resolved).matmul / resolved.machine.cpu_flops
    return best


def _show_progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\rstep {done} of {of}" + ("\n" if done == of else ""), nl=False, err=True)
