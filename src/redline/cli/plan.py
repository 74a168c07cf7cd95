"""redline plan"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.completion import complete_cards
from redline.cli.options import JsonOption, RecipeArgument, split_words

if TYPE_CHECKING:
    from redline.hardware.machine import Machine
    from redline.recipe.forecast import ProbeResult
    from redline.recipe.resolve import DataFacts, Resolved
    from redline.recipe.schema import Recipe
from collections.abc import Mapping

from redline.errors import UsageError, UserError
from redline.units import format_count, format_seconds, format_usd


def _parse_rate(text: str) -> float:
    """Parse tokens/s, with or without a unit: 700000 or 700k."""
    from redline.units import parse_count

    try:
        rate = float(text) if text.replace(".", "", 1).isdecimal() else float(parse_count(text))
    except (ValueError, OverflowError):
        rate = 0.0
    if not 1.0 <= rate <= 1e15:
        raise typer.BadParameter(f"{text!r} is not a number of tokens per second. Use, for example, 700000 or 700k.")
    return rate


def plan(
    recipe: RecipeArgument = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_cards,
            help="The card to plan for: h100, h200, a100-80gb, ...; auto for this machine, or cpu.",
        ),
    ] = "auto",
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="GPUs per node.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes.")] = 1,
    price: Annotated[
        float | None, typer.Option(min=0.0, max=1e6, metavar="USD", help="Price of one GPU per hour, in dollars.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target-tokens-per-s",
            metavar="N",
            parser=_parse_rate,
            help="Check whether a speed is possible, for example 700k; exit with 1 if it is not.",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure memory and speed with a few real steps on this machine.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="With several GPUs: draw speed, time and cost against their number."),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Compute memory, speed, time and cost of a run before it starts.

    Examples:
      redline plan pretrain-350m --gpu h100 --price 2.5
      redline plan pretrain-350m --gpu h100 --target-tokens-per-s 700000
      redline plan quickstart --probe --json
      redline plan pretrain-350m --gpu h100 --gpus 8 --nodes 4 --price 2.5 --figure scaling.svg
    """
    from redline.data.estimate import expected_facts
    from redline.errors import UserError
    from redline.fields import none_if_auto
    from redline.jobs.base import job
    from redline.recipe.forecast import check_target, forecast
    from redline.recipe.load import load
    from redline.recipe.resolve import resolve
    from redline.recipe.scaling import scaling

    check_figure(figure, gpus * nodes)
    name, overrides = split_words(recipe, "plan")
    loaded = load(name or "quickstart", overrides)
    loaded = replace(loaded, recipe=_complete(loaded.recipe))
    facts = expected_facts(loaded.recipe.data, int(none_if_auto(loaded.recipe.model.vocab) or 0))
    facts = replace(facts, vocab_size=facts.vocab_size + job(loaded.recipe.objective).added_tokens(loaded.recipe))
    machine = _machine(gpu, loaded.recipe)

    def resolve_for(cards: int, of_nodes: int) -> Resolved:
        return resolve(loaded.recipe, machine, facts, gpus=cards, nodes=of_nodes)

    resolved = resolve_for(gpus, nodes)
    measured = _probe(resolved, facts, gpu) if probe else None
    price = _price(price, loaded.recipe)
    event = resolved.plan_event(price=price, measured=measured)
    event["warnings"] = [*loaded.notes, *event["warnings"], *_caveats(resolved, facts, price)]
    event["measured"] = vars(measured) if measured else None
    several = gpus * nodes > 1
    table = scaling(resolve_for, gpus, nodes, price=price, measured=measured).event() if several else None
    event["scaling"] = table
    refusal: UserError | None = None
    if target is not None:
        try:
            warning = check_target(target, resolved, forecast(resolved, price=price, measured=measured))
            event["warnings"] += [warning] if warning else []
        except UserError as error:
            refusal = error
        event["target"] = {
            "tokens_per_s": target,
            "possible": refusal is None,
            "reason": refusal.message() if refusal else None,
        }
    if figure is not None and table is not None:
        write_figure(figure, table, f"{loaded.name} on {resolved.machine.name}")
    if json_:
        import json

        typer.echo(json.dumps(event, allow_nan=False))
        raise typer.Exit(refusal.exit_code if refusal else 0)
    if refusal:
        raise refusal
    _show(event)
    if table is not None:
        typer.echo("\n".join(scale_lines(table)))


def _complete(recipe: Recipe) -> Recipe:
    """A recipe that leaves its shape to a base needs to see that; one that states it can be planned without."""
    from redline.fields import AUTO

    if recipe.model.base is None or AUTO not in (recipe.model.layers, recipe.model.vocab):
        return recipe
    from redline.jobs.objective import job_runtime

    completed: Recipe = job_runtime(recipe.objective).complete(recipe, lambda text: typer.echo(text, err=True))
    return completed


def _machine(gpu: str, recipe: Recipe) -> Machine:
    """The card that is named, or the machine at hand."""
    if gpu not in ("auto", "cpu"):
        from redline.hardware.machine import named_gpu

        return named_gpu(gpu)
    from redline.hardware.machine import local_cpu, local_machine

    on_cpu = gpu == "cpu" or recipe.train.device == "cpu"
    known = local_cpu() if on_cpu else local_machine()
    if known is not None and (on_cpu or recipe.train.device in ("auto", known.device)):
        return known
    from redline.errors import UserError
    from redline.hardware.probe import detect_machine  # measures this CPU, once

    try:
        return detect_machine("cpu" if on_cpu else recipe.train.device)
    except UserError as error:
        fix = "Name the card to plan for, as --gpu h100; or use train.device=cpu."
        raise UserError(error.what, where="train.device", fix=fix) from None


def _probe(resolved: Resolved, facts: Any, gpu: str) -> ProbeResult:
    """Real steps in a process of their own."""
    from redline.bench.trial import run_trial
    from redline.errors import UsageError
    from redline.hardware.probe import detect_machine

    here = detect_machine(resolved.machine.device if gpu != "auto" else "auto")
    planned = resolved.machine
    if (here.spec or here.name) != (planned.spec or planned.name):
        fix = "Leave --gpu out, or --probe."
        raise UsageError(f"this machine has a {here.name}, which is no {gpu}.", where="--probe", fix=fix)
    return run_trial(_share(resolved), facts)


def _share(resolved: Resolved) -> Resolved:
    """What one card of several does in a step."""
    share = resolved.batch.micro * resolved.batch.accumulation
    train = resolved.recipe.train.model_copy(update={"global_batch": share})
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"train": train}))


def _price(given: float | None, recipe: Recipe) -> float | None:
    from redline.runs.monitor import price_of

    return given if given is not None else price_of(recipe.monitor.price_per_hour)


def _caveats(resolved: Resolved, facts: DataFacts, price: float | None) -> list[str]:
    """What the figures leave open."""
    from redline.runs.monitor import price_notes

    train, found = resolved.recipe.train, []
    if not facts.train_tokens:
        epochs = ": train.epochs cannot be counted" if train.epochs else ""
        sources = " and ".join(part.source for part in resolved.recipe.data.parts)
        found.append(f"how many tokens {sources} holds is not known before it is prepared{epochs}")
    elif facts.estimated and train.epochs:
        found.append("the number of tokens is estimated from the size of the files")
    if resolved.batch.world > 1 and resolved.machine.device == "cuda":
        found.append("the speed of several cards is an estimate: what they tell each other was never timed")
    return [*found, *price_notes(price)]


def _show(event: dict[str, Any]) -> None:
    import sys

    from redline.runs.console import Console

    console = Console(file=sys.stdout)
    console.event({"type": "plan", **event})
    console.close()


# ----------------------------------------------------------------------------------------------------
# redline plan --gpus N --nodes M: the table of world sizes, and its figure.


_HEAD = ("cards", "shared by", "micro × acc.", "ms a step", "waiting", "tokens/s", "of ideal", "time", "cost", "")
_UNKNOWN = "?"


def scale_lines(scaling: Mapping[str, Any]) -> list[str]:
    """The rows under their heads, then when it stops paying, and what all that rests on."""
    table = [_HEAD, *(_cells(row) for row in scaling["rows"])]
    shown = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in shown]
    lines = ["  " + "  ".join(map(str.ljust, cells, widths)).rstrip() for cells in zip(*shown, strict=True)]
    notes = [scaling["verdict"], *(f"left out: {what}" for what in scaling["left_out"])]
    if scaling["pays_up_to"] is not None:
        notes.append("estimates, not measurements: " + ", ".join(scaling["assumptions"]))
    return ["", *lines, *(f"  {note}" for note in notes)]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    several = f" ({row['gpus']} × {row['nodes']} nodes)" if row["nodes"] > 1 else ""
    known = row["tokens_per_s"] is not None
    return (
        f"{row['world']}{several}",
        "" if row["mode"] == "single" else row["mode"],
        f"{row['micro']} × {row['accumulation']}",
        f"{row['step_ms']:,.1f}" if known else _UNKNOWN,
        f"{row['exposed_ms']:,.1f}" if known else _UNKNOWN,
        format_count(row["tokens_per_s"]) if known else _UNKNOWN,
        _UNKNOWN if not known else "" if row["efficiency"] is None else f"{row['efficiency']:.0%}",
        "" if row["hours"] is None else format_seconds(3600 * row["hours"]),
        "" if row["cost_usd"] is None else format_usd(row["cost_usd"]),
        "" if row["fits"] else "does not fit by estimate",
    )


def check_figure(path: Path | None, world: int) -> None:
    """Before anything is planned."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise UsageError("the figure is an SVG file.", where="--figure", fix="Give it a name that ends in .svg.")
    if world == 1:
        raise UsageError("one card has nothing to scale.", where="--figure", fix="Add --gpus N or --nodes N.")


def write_figure(path: Path, scaling: Mapping[str, Any], title: str) -> None:
    if scaling["pays_up_to"] is None:
        raise UserError(f"there is nothing to draw: {scaling['verdict']}.", where="--figure")
    from redline.runs.report.figures import scaling_svg

    try:
        path.write_text(scaling_svg(scaling, title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}.", where=str(path), fix="Choose another place.") from None
