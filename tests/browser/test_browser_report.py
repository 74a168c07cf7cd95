"""The report and the comparison in a browser: no requests, no horizontal scrolling, tabs by keyboard and in print."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from redline.runs.report.compare import write_comparison
from redline.runs.report.page import write_report


def make(run: Path, speed: float) -> Path:
    run.mkdir()
    recipe = {"objective": "causal_lm", "train": {"lr": speed, "a_key_with_a_rather_long_name": "value"}}
    (run / "lock.json").write_text(json.dumps({"recipe_name": "toy", "recipe": recipe, "git": {"commit": "0" * 40}}))
    events: list[dict[str, Any]] = [{"type": "start", "time": 0.0, "overrides": ["data.source=/a/very/long/path" * 3]}]
    for step in range(1, 61):
        loss = 3 + 6 * math.exp(-speed * step / 20)
        spent = {"tokens": 1000 * step, "hours": step / 3600, "cost_usd": step / 100}
        events.append({"type": "step", "time": float(step), "step": step, "loss": loss, "step_ms": 9.0, **spent})
        if step % 20 == 0:
            events.append({"type": "eval", "time": float(step), "step": step, "loss": loss})
            events.append(
                {"type": "checkpoint", "time": float(step), "step": step, "path": "checkpoints/x", "bytes": 9}
            )
    events.append({"type": "warning", "time": 61.0, "message": "something, in a sentence that is long enough to wrap"})
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("pages")
    runs = [make(root / name, speed) for name, speed in (("one", 1.0), ("two", 0.5), ("three", 2.0))]
    return {"report": write_report(runs[0]).as_uri(), "comparison": write_comparison(runs).as_uri()}


def opened(page: Any, address: str, width: int, scheme: str = "light") -> Any:
    page.messages()
    page.requests()
    page.size(width)
    page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.driver.get(address)
    return page


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_fits_its_width_and_requests_nothing(page: Any, pages: dict[str, str], name: str, width: int) -> None:
    opened(page, pages[name], width)
    assert page.requests() == [pages[name]]
    assert page.messages() == []
    assert page.run("document.documentElement.scrollWidth") <= width
    tall = page.run(
        "[...document.querySelectorAll('figure svg')].filter(e => e.clientWidth > 0 && e.clientHeight < 60)"
    )
    assert tall == [], "a figure is large enough to read"


# The rows of each grid: the width of the grid, and where the last box of the row ends.
ROWS = """[...document.querySelectorAll('.grid')].filter(grid => grid.clientWidth).flatMap(grid => {
  const rows = {}, right = grid.getBoundingClientRect().right;
  for (const box of [...grid.children].map(child => child.getBoundingClientRect()))
    rows[box.top] = Math.max(rows[box.top] ?? 0, box.right);
  return Object.values(rows).map(end => right - end);
})"""
TEXT_PIXELS = """[...document.querySelectorAll('figure svg')].filter(svg => svg.clientWidth).flatMap(svg =>
  [...svg.querySelectorAll('text')].map(text =>
    parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a))"""


@pytest.mark.parametrize("name", ["report", "comparison"])
@pytest.mark.parametrize("width", [1280, 900, 400])
def test_no_place_of_a_grid_is_empty_and_charts_can_be_read(
    page: Any, pages: dict[str, str], name: str, width: int
) -> None:
    opened(page, pages[name], width)
    left_over = page.run(ROWS)
    assert left_over
    assert max(left_over) < 1
    sizes = page.run(TEXT_PIXELS)
    assert sizes
    assert 9.5 <= min(sizes) <= max(sizes) < 19


def test_the_validation_loss_has_no_colour_of_alarm(page: Any, pages: dict[str, str]) -> None:
    opened(page, pages["report"], 1280)
    colours = page.run("[...document.querySelectorAll('.value')].map(value => getComputedStyle(value).color)")
    assert set(colours) == {page.run("getComputedStyle(document.body).color")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_scheme_and_text_can_be_read(page: Any, pages: dict[str, str], scheme: str) -> None:
    opened(page, pages["comparison"], 1280, scheme)
    ink, paper = (page.run(f"getComputedStyle(document.body).{key}") for key in ("color", "backgroundColor"))
    light, dark = sorted((luminance(colour) for colour in (ink, paper)), reverse=True)
    assert (luminance(paper) > 0.5) == (scheme == "light")
    assert (light + 0.05) / (dark + 0.05) > 7


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


SHOWN = "[...document.querySelectorAll('.view')].map(view => view.offsetHeight > 0)"


def test_tabs_work_by_keyboard_and_without_scripts(page: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    page.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened(page, pages["comparison"], 1280)
        assert page.run(SHOWN) == [True, False, False, False]
        page.keys(Keys.TAB)
        page.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert page.run(SHOWN) == [False, False, True, False]
    finally:
        page.command("Emulation.setScriptExecutionDisabled", value=False)


def test_every_view_is_printed(page: Any, pages: dict[str, str]) -> None:
    opened(page, pages["comparison"], 1280)
    page.command("Emulation.setEmulatedMedia", media="print")
    assert page.run(SHOWN) == [True, True, True, True]
    assert page.run("getComputedStyle(document.querySelector('.tabs > label')).display") == "none"
    page.command("Emulation.setEmulatedMedia", media="")


def test_one_click_selects_the_whole_command(page: Any, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(page, pages["report"], 1280)
    where = page.driver.find_elements("css selector", "pre.copy")[-1]
    page.run("document.querySelectorAll('pre.copy')[1].scrollIntoView({block: 'center'})")
    ActionChains(page.driver).click(where).perform()
    assert page.run("getSelection().toString()").strip() == where.text.strip()
