"""The numbers of `redline plan --json` for every shipped recipe on every known card.

`golden_plans.json` holds them as the planner computed them before the package was restructured. A change of the planner
that moves numbers on purpose writes the file again, in a commit of its own that explains why they moved:

    PYTHONPATH=src .venv/bin/python tests/planning/golden_plans.py

Sentences are not compared, because their wording may improve: see `WORDING`. Of a list of sentences, its length is.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

FILE = Path(__file__).with_name("golden_plans.json")
# Every recipe is planned for each card of INTERFACE.md, at a price, so that hours become a cost.
CARDS = (
    *("h100", "h100-pcie", "h100-nvl", "h200", "gh200", "b200", "a100-40gb", "a100-80gb"),
    *("l40s", "l4", "rtx4090", "rtx5090", "cpu"),
)
SEVERAL = (("h100", 4, 1), ("h200", 2, 2), ("rtx4090", 2, 1), ("cpu", 2, 1))  # (card, GPUs per node, nodes)
PRICE = 2.5
# A card's name from the table decides everything but the CPU's rates, memory and cores, which are these.
CPU_RATES = {"fp32": 1e11, "bf16": 4e10, "copy": 8e9}
CPU_MEMORY, CPU_CORES = 32 << 30, 4
MISSING = "-"
WORDING = {"reason", "source", "assumed", "verdict", "warnings", "left_out", "assumptions"}


def situations() -> list[tuple[str, list[str]]]:
    """Return each situation's name and the options of `redline plan` that describe it."""
    single = [(card, ["--gpu", card]) for card in CARDS]
    several = [
        (f"{card}, {gpus} on each of {nodes}", ["--gpu", card, "--gpus", str(gpus), "--nodes", str(nodes)])
        for card, gpus, nodes in SEVERAL
    ]
    return single + several


def recipe_names() -> list[str]:
    import redline

    return sorted(path.stem for path in (Path(redline.__file__).parent / "recipes").glob("*.yaml"))


def plan_table(recipe: str) -> dict[str, Any]:
    """Plan a recipe in every situation. Return a list of values by field, or the one value that all have in common.

    A field that a situation lacks is `MISSING` there; a refused plan has only the field `exit_code`.
    """
    plans = [_fields(_plan(recipe, options)) for _, options in situations()]
    names = sorted({name for fields in plans for name in fields})
    rows = {name: [fields.get(name, MISSING) for fields in plans] for name in names}
    return {name: row[0] if all(map(_same, row, row[1:])) else row for name, row in rows.items()}


@contextlib.contextmanager
def fixed_machine() -> Iterator[None]:
    """Replace what a plan reads from this machine: the CPU's facts, the cache of prepared data, the price."""
    facts = {
        "read_rates": lambda key: dict(CPU_RATES),
        "cpu_name": lambda: "a CPU",
        "host_memory_bytes": lambda: CPU_MEMORY,
        "available_cores": lambda: CPU_CORES,
        "cpp_compiler": lambda: "g++",
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in facts.items():
            stack.enter_context(mock.patch(f"redline.hardware.machine.{name}", replacement))
        empty = stack.enter_context(tempfile.TemporaryDirectory())
        environment = {"REDLINE_CACHE": empty, "HF_HOME": empty, "HF_HUB_OFFLINE": "1"}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        os.environ.pop("REDLINE_PRICE", None)
        yield


def _plan(recipe: str, options: list[str]) -> dict[str, Any]:
    from redline.errors import UserError

    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            _command().main(["plan", recipe, *options, "--price", str(PRICE), "--json"], standalone_mode=False)
    except UserError as error:
        return {"exit_code": error.exit_code}
    return dict(json.loads(output.getvalue()))


@functools.cache
def _command() -> Any:
    """Return the parser of `redline`; typer's test runner would build it again for each plan, which takes longer."""
    import typer

    from redline.cli.main import app

    return typer.main.get_command(app)


def _fields(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten a plan into `path: value`; a choice's path ends in its key, so that their order does not matter."""
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, of, key in WORDING) for key, of in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}.{_name(of, number)}", of, False) for number, of in enumerate(value)]
    else:
        return {path: value}
    fields: dict[str, Any] = {} if items else {path: value}
    for key, of, wording in items:
        if not wording:
            fields |= _fields(of, key)
        elif isinstance(of, list):
            fields[f"{key}.length"] = len(of)
    return fields


def _name(entry: Any, number: int) -> str:
    return str(entry["key"]) if isinstance(entry, dict) and "key" in entry else str(number)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def main() -> None:
    with fixed_machine():
        tables = {recipe: plan_table(recipe) for recipe in recipe_names()}
    blocks = [f'"situations": {json.dumps([name for name, _ in situations()])}']
    for recipe, table in tables.items():
        rows = [f" {json.dumps(name)}: {_compact(value)}" for name, value in table.items()]
        blocks.append(f"{json.dumps(recipe)}: {{\n" + ",\n".join(rows) + "\n}")
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
    print(f"{FILE.name}: {len(tables)} recipes, {FILE.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


if __name__ == "__main__":
    main()
