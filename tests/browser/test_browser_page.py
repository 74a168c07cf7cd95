"""The live page in a browser: complete, self-contained, safe, usable by keyboard, and updated while a run trains."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from live_logs import PLAN, evaluation, lines, sample, start, step, write_run

from redline.runs.live import server as page_scripts

pytestmark = pytest.mark.timeout(120)

HOSTILE = "<img src='//evil.example/x' onerror='document.title=1'></pre><script>document.title=2</script>"
GOING = [start(), PLAN, *(step(n) for n in range(1, 101)), evaluation(50), evaluation(100), sample(100, HOSTILE)]
FITS = "[...document.querySelectorAll('.plot')].every((p) => p.querySelector('canvas').clientWidth === p.clientWidth)"
CHARTS = {
    *("loss", "tokens_per_s", "mfu", "step_ms", "data_wait_ms", "grad_norm", "lr", "gpu_util", "power_w"),
    *("sm_clock_mhz", "temperature_c", "memory_gib"),
}


def test_every_chart_of_the_page_is_in_these_tests() -> None:
    """A new chart that the test's log has no values for would never be drawn here."""
    source = Path(page_scripts.__file__).with_name("page").joinpath("charts.js").read_text(encoding="utf-8")
    keys = set(re.findall(r'^\s*\{?\s*key: "(\w+)"', source, re.MULTILINE))
    assert {"data_wait_ms" if key == "data_wait" else key for key in keys} == CHARTS


def shown(page: Any) -> set[str]:
    names = "[...document.querySelectorAll('#charts figure:not([hidden])')].map((f) => f.id.slice(6))"
    return {{"data_wait": "data_wait_ms"}.get(name, name) for name in page.run(names)}


def append(run: Path, *events: dict[str, Any]) -> None:
    with open(run / "events.jsonl", "ab") as file:
        file.write(lines(events))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_page_of_a_run(page: Any, served: Any, tmp_path: Path, width: int, scheme: str) -> None:
    run = write_run(tmp_path / "runs/<i>first", GOING)
    with open(run / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        page.open(served(tmp_path / "runs", run), width, scheme)
        assert shown(page) == CHARTS
        assert page.text("h1 span") == "<i>first"
        assert page.text(".far").startswith("50 % done: step 100 of about 200")
        assert "285k tokens/s: 50.0 % MFU, 95 % of the plan" in page.text(".facts")
        assert page.text(".pill") == "running"
        assert "activations 61.2 GiB" in page.text("#bars")
        assert "measured 77.5 GiB" in page.text("#bars")
        assert "at its power limit in 67 %" in page.text("#chart-sm_clock_mhz .lines")
        assert "the data are few" in page.text("#notes")
        assert page.text("#samples pre") == f"The {HOSTILE}", "a sample is shown as text"
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing overflows the page"
        dark = page.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 19, 18)"
        assert dark == (scheme == "dark")
        page.wait(FITS)
        page.size(width - 60)
        page.wait(FITS)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "at any width"
    requested = [urlparse(address) for address in page.requests()]
    assert requested
    assert {(address.scheme, address.hostname) for address in requested} <= {("http", "127.0.0.1"), ("data", None)}
    assert page.messages() == [], "the content security policy blocked nothing"


# Where the last chart of each row ends, from the right side of the grid.
ROW_ENDS = """(() => {
  const grid = document.querySelector('#charts'), rows = {};
  for (const figure of grid.querySelectorAll('figure:not([hidden])')) {
    const box = figure.getBoundingClientRect();
    rows[box.top] = Math.max(rows[box.top] ?? 0, box.right);
  }
  return Object.values(rows).map((end) => grid.getBoundingClientRect().right - end);
})()"""


@pytest.mark.parametrize("fields", [[], ["power_w"], ["power_w", "gpu_util"]])
def test_no_place_of_the_grid_is_empty(page: Any, served: Any, tmp_path: Path, fields: list[str]) -> None:
    """Whatever number of charts the log has values for, the last row is as wide as the others."""
    run = write_run(tmp_path / "run", [start(), PLAN, *(step(n, **dict.fromkeys(fields)) for n in range(1, 30))])
    page.open(served(tmp_path, run))
    assert shown(page) == CHARTS - set(fields)
    ends = page.run(ROW_ENDS)
    assert len(ends) > 2
    assert max(ends) < 1


RANKS = {
    "forward_ms": [100.0, 100.0, 140.0, 101.0],
    "temperature_c": [60.0, 61.0, 85.0, 62.0],
    "power_w": [650.0, 651.0, 480.0, 652.0],
    "throttle": ["", "", "thermal", ""],
}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_ranks_side_by_side(page: Any, served: Any, tmp_path: Path, width: int, scheme: str) -> None:
    steps = [step(n, samples_per_s=278.3, ranks=RANKS) for n in range(1, 30)]
    run = write_run(tmp_path / "runs/four", [start(), PLAN, *steps])
    page.open(served(tmp_path / "runs", run), width, scheme)
    assert "285k tokens/s (278.3 samples/s)" in page.text(".facts")
    rows = page.run("[...document.querySelectorAll('.spreads tbody tr')].map((row) => row.textContent)")
    assert rows[:2] == [
        "forward passes of a step (ms)100.0 rank 0100.5 140.0 rank 2",
        "power (W)480 rank 2651 652 rank 3",
    ]
    notes = page.run("[...document.querySelectorAll('.straggler')].map((note) => note.textContent)")
    assert [note.split(":")[0] for note in notes] == [
        *("Rank 2 is the slowest", "Throttled for heat or power supply", "Rank 2 has the hottest card")
    ]
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing overflows the page"
    assert page.messages() == []


def test_the_page_updates_and_survives_a_restart(page: Any, served: Any, tmp_path: Path) -> None:
    """Before the run starts, while it trains, after it was resumed, and after the server was restarted."""
    root = tmp_path / "runs"
    address = served(root)
    page.open(address)
    page.wait("document.getElementById('empty').innerText.includes('as soon as it starts')")
    run = write_run(root / "later", GOING[:52])
    page.wait("document.querySelector('.far')?.innerText.includes('step 50')")
    append(run, *(step(n) for n in range(51, 81)))
    page.wait("document.querySelector('.far').innerText.includes('step 80')")
    append(run, start(time=1200.0, resumed_from=60), step(61), {"type": "warning", "time": 1201.0, "message": "again"})
    page.wait("document.querySelector('.far').innerText.includes('step 61')")
    assert "resumed from the checkpoint of step 60" in page.text("#notes")
    served.stop()
    page.wait("document.getElementById('link').innerText.includes('trying again')")
    append(run, step(62))
    served(root, port=urlparse(address).port)
    page.wait("document.querySelector('.far').innerText.includes('step 62')")
    page.wait("!document.getElementById('link').innerText.includes('trying')")
    assert page.text("#notes").count("again") == 1, "nothing is shown twice"


def test_several_runs_and_the_keyboard(page: Any, served: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    first = write_run(tmp_path / "runs/first", GOING)
    second = write_run(tmp_path / "runs/second", [start(), *(step(n, loss=9.0) for n in range(1, 50))])
    page.open(served(tmp_path / "runs", first, second))
    assert page.run("document.querySelectorAll('.head').length") == 2
    for attribute in ("stroke", "stroke-dasharray"):  # the runs differ without colour too
        drawn = page.run(f"[...document.querySelectorAll('#runs line')].map((l) => l.getAttribute('{attribute}'))")
        assert len(set(drawn)) == len(drawn) == 2
    assert "first 3.812 · first val 4.000 · second 9.000" in page.text("#chart-loss output")
    # by Tab and the arrows alone
    reached = []
    for _ in range(40):
        page.keys(Keys.TAB)
        reached.append(
            page.run("document.activeElement.id || document.activeElement.value || document.activeElement.className")
        )
        if reached[-1] == "plot":
            break
    assert {"step", "logarithmic", "plot"} <= set(reached)
    page.keys(Keys.HOME)
    assert page.text("#chart-loss output").endswith(" at 1")
    page.keys(Keys.ARROW_RIGHT)
    assert page.text("#chart-loss output").endswith(" at 2")
    page.keys(Keys.ESCAPE)
    assert " at " not in page.text("#chart-loss output")
    for axis in ("tokens", "hours"):
        page.run(f"document.querySelector('[value={axis}]').click()")
    page.run("document.getElementById('logarithmic').click()")
    assert page.run("document.querySelector('[name=axis]:checked').value") == "hours"
    page.run("document.querySelector('[data-run=second]').click()")
    page.wait("document.querySelectorAll('.head').length === 1")
    assert shown(page) == CHARTS
    assert page.messages() == []


def test_the_token_opens_the_page(page: Any, served: Any, tmp_path: Path) -> None:
    address = served(tmp_path, write_run(tmp_path / "run", GOING), guarded=True)
    page.open(address)
    assert page.run("location.search") == "", "the token does not stay in the address"
    assert page.run("document.cookie") == "", "no script can read the cookie"
    assert shown(page) == CHARTS


@pytest.mark.parametrize(
    "steps", [20_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
)
def test_a_long_log_stays_smooth(page: Any, served: Any, tmp_path: Path, capsys: Any, steps: int) -> None:
    import json
    import time

    run = write_run(tmp_path / "run", [start(), PLAN])
    with open(run / "events.jsonl", "ab") as file:
        for n in range(1, steps + 1):
            file.write(json.dumps(step(n, loss=3 + 0.1 * (n % 7), progress=n / steps / 2)).encode() + b"\n")
    address = served(tmp_path, run)
    begin = time.perf_counter()
    page.open(address)
    paint = page.run("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    first = time.perf_counter() - begin
    page.wait(f"document.querySelector('.far').innerText.includes('step {steps:,}')", 600)
    whole = time.perf_counter() - begin
    costs = []
    for n in range(steps + 1, steps + 4):
        append(run, step(n))
        page.wait(f"document.querySelector('.far').innerText.includes('step {n:,}')")
        costs.append(float(page.run("document.body.dataset.drawMs")))
    points = page.run(
        "performance.getEntriesByType('resource').filter((r) => r.name.includes('/api/')).at(-1).encodedBodySize"
    )
    with capsys.disabled():
        print(
            f"\nload: page of {steps:,} events: first paint {paint:.0f} ms, first curves {first:.2f} s, all read after"
            f" {whole:.1f} s; an update draws in {max(costs):.1f} ms at most and weighs {points:,} bytes"
        )
    assert max(costs) < 500
