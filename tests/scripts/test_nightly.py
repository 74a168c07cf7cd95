"""scripts/nightly.py goes on where it was interrupted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import nightly  # noqa: E402

COMMANDS = {"lint": ["make", "lint"], "data": ["pytest", "tests/data"], "data, long": ["pytest", "-m", "soak"]}


class Runner:
    """Note what is run; end with the exit code that is planned for a command, 0 if none is."""

    def __init__(self, codes: dict[str, int] | None = None, interrupted_at: str = "") -> None:
        self.codes, self.interrupted_at = codes or {}, interrupted_at
        self.ran: list[str] = []

    def __call__(self, command: list[str], environment: dict[str, str]) -> int:
        name = next(name for name, of in COMMANDS.items() if of == command)
        if name == self.interrupted_at:
            raise KeyboardInterrupt
        self.ran.append(name)
        return self.codes.get(name, 0)


def run(state: Path, runner: Runner, source: str = "a", **options: bool) -> int:
    return nightly.run_parts(COMMANDS, source, state, runner, **options)


def test_a_restart_runs_what_is_missing(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    first = Runner(interrupted_at="data")
    with pytest.raises(KeyboardInterrupt):
        run(state, first)
    second = Runner()
    assert run(state, second) == 0
    assert (first.ran, second.ran) == (["lint"], ["data", "data, long"])
    assert nightly.passed_parts(state, "a").keys() == COMMANDS.keys()


def test_a_failed_part_does_not_stop_the_others_and_is_repeated(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    assert run(state, Runner({"lint": 2, "data, long": nightly.NO_TESTS_COLLECTED})) == 1
    again = Runner()
    assert run(state, again) == 0
    assert again.ran == ["lint"]


def test_a_changed_source_begins_anew(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    run(state, Runner())
    for runner, source, options in ((Runner(), "b", {}), (Runner(), "b", {"again": True})):
        run(state, runner, source, **options)
        assert runner.ran == list(COMMANDS)


def test_an_unreadable_state_counts_as_none(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    for text in ("", "[]", '{"source": "a"}', '{"source": "a", "passed": 3}'):
        state.write_text(text)
        assert nightly.passed_parts(state, "a") == {}


def test_the_parts_cover_every_test_file() -> None:
    commands = nightly.parts(ROOT / "tests")
    for long in (False, True):
        words = {word for name, command in commands.items() if name.endswith(nightly.LONG) == long for word in command}
        for path in (ROOT / "tests").rglob("test_*.py"):
            parts = path.relative_to(ROOT).parts
            assert "/".join(parts[:2]) in words, path


def test_the_digest_is_that_of_the_source() -> None:
    assert nightly.source_digest() == nightly.source_digest()
