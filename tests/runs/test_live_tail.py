"""Following a log: the state does not depend on how the log arrives, and long curves keep their lows and highs."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_logs import PLAN, evaluation, lines, sample, start, step

from redline.runs.events import read_events
from redline.runs.live.watch import Cursor, Tail, WatchedRun
from redline.runs.state import Curve

NOW = 2000.0


def shown(run: WatchedRun) -> dict[str, Any]:
    """Return all that a page shows, without numbers that only count changes."""
    answer = run.update(Cursor(), NOW, seconds=None)
    return {key: value for key, value in answer.items() if key not in ("generation", "held_back")}


def fresh(path: Path) -> dict[str, Any]:
    return shown(WatchedRun(path, "run"))


@st.composite
def logs(draw: st.DrawFn) -> list[bytes]:
    """Draw the lines of a log with resumes and torn lines."""
    found, at = [lines([start(), PLAN])], 0
    for kind in draw(st.lists(st.sampled_from(["step"] * 6 + ["eval", "sample", "torn", "resume", "warning"]))):
        if kind == "step":
            at += draw(st.integers(1, 3))
            loss = draw(st.one_of(st.none(), st.floats(0, 20), st.just(math.inf)))
            found.append(json.dumps(step(at, loss=loss)).encode() + b"\n")
        elif kind == "eval":
            found.append(lines([evaluation(at, draw(st.floats(0, 20)))]))
        elif kind == "sample":
            found.append(lines([sample(at, draw(st.text()))]))
        elif kind == "torn":
            found.append(draw(st.sampled_from([b'{"type": "st\n', b"\n", b"\xff\xfe\n", b"[1]\n", b'{"type": 5}\n'])))
        elif kind == "resume":
            at = draw(st.integers(0, at))
            found.append(lines([start(resumed_from=at)]))
        else:
            found.append(lines([{"type": "warning", "time": 1500.0, "message": draw(st.text())}]))
    return found


@settings(max_examples=60, deadline=None)
@given(log=logs(), cuts=st.lists(st.integers(0, 1 << 14), max_size=12))
def test_any_chunking_of_the_file_gives_the_same_state(
    tmp_path_factory: pytest.TempPathFactory, log: list[bytes], cuts: list[int]
) -> None:
    whole = b"".join(log)
    places = sorted({0, *(cut % (len(whole) + 1) for cut in cuts), len(whole)})
    folder = tmp_path_factory.mktemp("run")
    run = WatchedRun(folder, "run")
    run.read_on()
    page = _Page()
    for begin, end in pairwise(places):
        with open(folder / "events.jsonl", "ab") as file:
            file.write(whole[begin:end])
        run.read_on()
        page.take(run)
    page.take(run)
    expected = fresh(folder)
    assert shown(run) == expected
    assert page.steps == expected["steps"]["x"]["step"], "a page that received the log in pieces has the same curve"
    assert page.losses == expected["steps"]["y"].get("loss", [None] * len(page.steps))


class _Page:
    """Replace rows from `from` on, as columns.js does."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        self.steps: list[Any] = []
        self.losses: list[Any] = []

    def take(self, run: WatchedRun) -> None:
        answer = run.update(self.cursor, NOW)
        new, keep = answer["steps"], answer["steps"]["from"]
        self.steps = self.steps[:keep] + new["x"]["step"]
        self.losses = self.losses[:keep] + new["y"].get("loss", [None] * new["rows"])
        numbers = (answer["generation"], new["buckets"], answer["evals"]["buckets"], answer["number"])
        self.cursor = Cursor.parse(".".join(map(str, numbers)))
        assert self.cursor.generation == answer["generation"]


@settings(max_examples=40, deadline=None)
@given(log=logs())
def test_events_that_a_resumed_run_repeats_are_dropped_as_in_read_events(
    tmp_path_factory: pytest.TempPathFactory, log: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "events.jsonl").write_bytes(b"".join(log))
    events = read_events(folder / "events.jsonl")
    answer = fresh(folder)
    assert answer["steps"]["x"]["step"] == [event["step"] for event in events if event["type"] == "step"]
    assert answer["evals"]["x"]["step"] == [event["step"] for event in events if event["type"] == "eval"]
    texts = [sample["step"] for sample in answer["samples"]]
    assert texts == [event["step"] for event in events if event["type"] == "sample"][-40:]
    assert answer["unreadable"] == events.unreadable


@pytest.mark.parametrize("how", ["cut", "replaced", "cut and longer"])
def test_a_log_that_was_replaced_is_read_from_its_beginning(tmp_path: Path, how: str) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(lines([start(), *(step(n) for n in range(1, 30))]))
    run = WatchedRun(tmp_path, "run")
    assert shown(run)["steps"]["rows"] == 29
    count = 60 if how == "cut and longer" else 5
    again = lines([start(time=1700.0), *(step(n, loss=1.0) for n in range(1, count))])
    if how == "replaced":
        (tmp_path / "new").write_bytes(again)
        (tmp_path / "new").replace(log)
    else:
        os.truncate(log, 0)
        log.write_bytes(again)
    answer = shown(run)
    assert answer["steps"]["y"]["loss"] == [1.0] * (count - 1)
    assert answer == fresh(tmp_path)


def test_an_endless_line_is_not_kept_in_memory(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(lines([step(1)]) + b'{"type": "' + b"x" * (9 << 20))
    tail = Tail(log)
    assert sum(len(found or []) for found in tail.read()) == 1
    assert len(tail._rest) <= 4 << 20
    with open(log, "ab") as file:
        file.write(b'"}\n' + lines([step(2)]))
    assert [json.loads(line)["step"] for found in tail.read() for line in found or []] == [2]


def test_pipes_links_and_folders_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "there").write_bytes(lines([step(1)]))
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name in ("pipe", "link", "", "missing"):
        assert list(Tail(tmp_path / name).read()) == []
    assert list(Tail(tmp_path / "there").read())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=400), st.integers(8, 60))
def test_a_curve_keeps_every_spike(values: list[float | None], most: int) -> None:
    curve = Curve(("step",), ("y",), max_buckets=most)
    for place, value in enumerate(values):
        curve.add([place], [value])
    shown = curve.since(0)
    assert len(curve) <= most
    assert shown["rows"] <= 2 * most
    assert shown["x"]["step"] == sorted(shown["x"]["step"])
    known, drawn = [v for v in values if v is not None], [v for v in shown["y"].get("y", []) if v is not None]
    if known:
        assert min(drawn) == pytest.approx(min(known), rel=1e-5)
        assert max(drawn) == pytest.approx(max(known), rel=1e-5)


def test_the_beginning_of_a_long_curve_keeps_its_points() -> None:
    """A logarithmic axis shows each decade, so each has points."""
    curve = Curve(("step",), ("y",))
    for place in range(1, 100_001):
        curve.add([place], [float(place)])
    steps = curve.since(0)["x"]["step"]
    assert len(steps) <= 2000
    for decade in (1, 10, 100, 1000, 10_000):
        assert sum(decade <= at < 10 * decade for at in steps) >= min(9, 9 * decade) * 4 ** (decade > 1)
