"""The numbers, keys and enum values of `redline plan --json` stay what `golden_plans.json` says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_plans import FILE, fixed_machine, plan_table, recipe_names, situations

GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_shipped_recipe_and_card_is_covered() -> None:
    from redline.hardware.specs import SPECS

    assert GOLDEN["situations"] == [name for name, _ in situations()]
    assert sorted(GOLDEN.keys() - {"situations"}) == recipe_names()
    assert {*SPECS, "cpu"} <= set(GOLDEN["situations"])


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_numbers_of_a_plan_do_not_change(recipe: str) -> None:
    with fixed_machine():
        table = json.loads(json.dumps(plan_table(recipe)))
    before = GOLDEN[recipe]
    changed = {key: (before.get(key), table.get(key)) for key in before | table if before.get(key) != table.get(key)}
    assert not changed, f"{recipe} (before, now): {changed}; see golden_plans.py to accept a change made on purpose"
