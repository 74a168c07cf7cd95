"""The table of stop reasons: status, exit code and the keys of the recipe that set an end."""

from __future__ import annotations

import json

import pytest

from redline.recipe.schema import Recipe
from redline.vocabulary import StopReason, parse_stop_reason, status_of_stop

ENDINGS = {  # reason: status, exit code if saved, exit code if not saved
    "steps": ("finished", 0, 1),
    "hours": ("finished", 0, 1),
    "target_loss": ("finished", 0, 1),
    "patience": ("finished", 0, 1),
    "requested": ("stopped", 0, 1),
    "nonfinite": ("failed", 1, 1),
    "preempted": ("preempted", 75, 1),
    "interrupted": ("stopped", 130, 1),
    "moved": ("stopped", 0, 2),
    "damaged_data": ("failed", 1, 1),
}


def test_every_reason_has_a_status_and_an_exit_code():
    endings = {reason: (reason.status, reason.exit_code(), reason.exit_code(saved=False)) for reason in StopReason}
    assert endings == ENDINGS


def test_reasons_are_plain_strings_in_json():
    assert json.loads(json.dumps({"reason": StopReason.HOURS, "status": StopReason.HOURS.status})) == {
        "reason": "hours",
        "status": "finished",
    }


def test_recipe_keys_of_a_reason_exist_in_the_recipe():
    sections = Recipe.model_fields
    for reason in StopReason:
        for key in reason.recipe_keys:
            section, name = key.split(".")
            assert name in sections[section].annotation.model_fields
        assert bool(reason.recipe_keys) == (reason.status == "finished")


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("reached 300 steps", "finished"),
        ("no improvement for 5 evaluations", "finished"),
        ("", "finished"),
        (None, "finished"),
        ("preempted (SIGTERM)", "preempted"),
        ("SIGUSR1", "preempted"),
        ("stop requested", "stopped"),
        ("stop-requested", "stopped"),
        ("Ctrl-C", "stopped"),
        ("failed: 10 non-finite steps in a row", "failed"),
        ("error: disk full", "failed"),
        ("out of memory", "failed"),
    ],
)
def test_reasons_of_other_versions_keep_their_status(reason, status):
    assert parse_stop_reason(reason) is None
    assert status_of_stop({"type": "stop", "reason": reason}) == status


def test_a_run_whose_last_state_was_not_saved_has_failed():
    assert {status_of_stop({"reason": reason, "saved": False}) for reason in (*StopReason, "other")} == {"failed"}
