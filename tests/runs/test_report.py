import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from redline.errors import UserError
from redline.runs.events import EventLog
from redline.runs.report.figures import draw_figures, thin
from redline.runs.report.page import report_data, write_page, write_report

LOCK = {
    "schema": 1,
    "run_id": "8f1c",
    "recipe_name": "pretrain-350m",
    "recipe": {"objective": "causal_lm", "train": {"steps": 60}},
    "choices": [{"key": "train.precision", "value": "bf16", "reason": "fp8 was <slower>"}],
    "seed": 7,
    "git": {"commit": "abc123", "dirty": False},
    "versions": {"torch": "2.13.0"},
    "machine": {"name": "NVIDIA H200"},
    "flops_per_token": {"formula": "6N + 12LHQT"},
}


def steps(count, every=1):
    for step in range(1, count + 1, every):
        yield {
            "step": step,
            "tokens": step * 1000,
            "loss": 3 + 7 * math.exp(-step / 20),
            "lr": 3e-4,
            "grad_norm": 1.0,
            "tokens_per_s": 400_000.0 + step,
            "mfu": 0.5,
            "mfu_causal": 0.45,
            "step_ms": 300.0,
            "data_wait_ms": 1.0,
            "memory_gib": 60.0 + step / 100,
            "hours": step / 3600,
            "cost_usd": None,
        }


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "my-run"
    path.mkdir()
    (path / "lock.json").write_text(json.dumps(LOCK))
    return path


def emit(run, *events):
    log = EventLog(run / "events.jsonl", clock=lambda: 1.75e9)
    for kind, fields in events:
        log.emit(kind, **fields)
    log.close()


@pytest.fixture
def finished_run(run):
    emit(
        run,
        ("start", {"resumed_from": None}),
        ("plan", {"warnings": ["little data"]}),
        ("sample", {"label": "before", "step": 0, "prompt": "Once", "text": "qq\x1b[31m"}),
        *(("step", fields) for fields in steps(60)),
        ("eval", {"step": 30, "loss": 4.0, "perplexity": 54.6, "bits_per_byte": 1.5}),
        ("eval", {"step": 60, "loss": 4.5, "perplexity": 90.0, "bits_per_byte": 1.6}),
        ("checkpoint", {"step": 60, "path": "checkpoints/step-00000060", "seconds": 0.4, "bytes": 3 << 30}),
        ("recovery", {"message": "micro-batch 32 → 16"}),
        ("step", {"step": 61, "loss": None, "skipped": 2}),
        ("sample", {"label": "after", "step": 60, "prompt": "Once", "text": "<script>alert(1)</script> & 'more'"}),
        ("stop", {"reason": "reached 60 steps", "step": 61, "tokens": 61_000, "hours": 0.5, "cost_usd": None}),
    )
    return run


def test_the_page_names_the_recipe_key_that_ended_the_run(run):
    emit(run, ("start", {}), *(("step", fields) for fields in steps(3)), ("stop", {"reason": "hours", "step": 3}))
    data = report_data(run)
    assert (data["status"], data["reason"], data["reason_text"]) == ("finished", "hours", "reached train.hours")
    assert "reached train.hours" in write_report(run).read_text()


def test_little_memory_is_shown_in_mib(run):
    few = [{**fields, "memory_gib": 0.0123} for fields in steps(3)]
    emit(run, ("start", {}), *(("step", fields) for fields in few))
    assert "13 MiB" in (text := write_report(run).read_text())
    assert "0.01 GiB" not in text


class Page(HTMLParser):
    """Collect the tags and links that a browser would load or run."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href", "action")]


def test_the_page_is_self_contained_and_inert(finished_run):
    text = write_report(finished_run).read_text()
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import", text)
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert re.findall(r"url\((?!#)", text) == []


def test_text_from_the_model_is_escaped(finished_run):
    text = write_report(finished_run).read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#39;more&#39;" in text
    assert "fp8 was &lt;slower&gt;" in text
    assert "\x1b" not in text


def test_the_page_shows_the_figures_of_the_run(finished_run):
    text = write_report(finished_run).read_text()
    for part in ("my-run", "finished", "reached 60 steps", "NVIDIA H200", "4.5000", "best 4.0000", "1.6000", "61k"):
        assert part in text
    for part in ("50.0%", "6N + 12LHQT", "60.6 GiB", "30m00s", "little data", "micro-batch 32 → 16", "2 updates"):
        assert part in text
    for part in ("checkpoints/step-00000060", "3.0 GiB", "abc123", "2.13.0", "seed 7", "objective: causal_lm"):
        assert part in text
    assert "$" not in text


def test_a_price_gives_a_cost(run):
    emit(run, ("stop", {"reason": "steps", "cost_usd": 12.5}))
    assert "$12.50" in write_report(run).read_text()


def test_there_is_a_figure_for_everything_measured(finished_run):
    text = write_report(finished_run).read_text()
    assert text.count("<svg") == 4
    for title in ("Loss", "Throughput", "Learning rate and gradient norm", "Step time"):
        assert f"<figcaption>{title}</figcaption>" in text


def test_figures_are_well_formed_and_take_the_colours_of_the_page():
    for figure in draw_figures(list(steps(60)), [{"step": 60, "loss": 3.0}]):
        ElementTree.fromstring(figure.svg)
        assert "var(--run-0)" in figure.svg
        assert "#0102" not in figure.svg
        assert "<text" in figure.svg


def test_ids_in_a_page_are_unique(finished_run):
    ids = re.findall(r'\sid="([^"]+)"', write_report(finished_run).read_text())
    assert len(ids) == len(set(ids))


ODD = [("step", {"step": None, "loss": None, "mfu": "much"}), ("sample", {}), ("checkpoint", {}), ("warning", {})]


@pytest.mark.parametrize(
    ("events", "measured"),
    [
        ([], False),
        ([("start", {"resumed_from": None})], False),
        (ODD, False),
        ([("eval", {"step": 0, "loss": 11.0})], True),
        ([("step", {"step": 1, "loss": 11.0})], True),
    ],
)
def test_a_run_with_few_events_has_a_page(run, events, measured):
    emit(run, *events)
    text = write_report(run).read_text()
    assert "pretrain-350m" in text
    assert ("Nothing has been measured yet" in text) != measured
    assert ("<svg" in text) == measured


@pytest.mark.parametrize("lock", ["", "{", "[]", '{"choices": 5, "machine": "x", "recipe": [], "git": null}'])
def test_a_broken_lock_costs_only_its_own_content(finished_run, lock):
    (finished_run / "lock.json").write_text(lock)
    assert "4.5000" in write_report(finished_run).read_text()


def test_only_evaluations_still_give_a_loss_figure(run):
    emit(run, ("eval", {"step": 0, "loss": 11.0}), ("eval", {"step": 10, "loss": 9.0}))
    assert write_report(run).read_text().count("<svg") == 1


def test_the_page_of_a_long_run_stays_small(run):
    emit(run, *(("step", fields) for fields in steps(20_000)))
    assert write_report(run).stat().st_size < 400_000


def test_thinning_keeps_the_ends_and_every_spike():
    x = np.arange(10_000.0)
    y = np.sin(x)
    y[[1234, 8000]] = 50.0, -50.0
    for logarithmic in (False, True):
        xs, ys = thin(x, y, 800, logarithmic)
        assert len(xs) <= 800
        assert (xs[0], xs[-1]) == (0, 9999)
        assert {1234.0, 8000.0} <= set(xs)
        assert (max(ys), min(ys)) == (50.0, -50.0)
        assert (np.diff(xs) > 0).all()


def test_the_data_is_plain_json_and_holds_the_headline(finished_run):
    data = json.loads(json.dumps(report_data(finished_run), allow_nan=False))
    headline = data["headline"]
    assert (headline["val_loss"], headline["best_val_loss"], headline["tokens"]) == (4.5, 4.0, 61_000)
    assert (headline["mfu_median"], headline["mfu_formula"]) == (0.5, "6N + 12LHQT")
    assert headline["tokens_per_s_median"] == pytest.approx(400_031.0)  # without the first logged step
    assert headline["peak_memory_gib"] == pytest.approx(60.6)
    assert data["skipped_steps"] == 2
    assert [incident["kind"] for incident in data["incidents"]] == ["warning", "recovery", "skipped"]
    assert len(data["steps"]) == 61


def test_steps_that_a_resumed_run_repeats_are_shown_once(run):
    emit(
        run,
        *(("step", fields) for fields in steps(60)),
        ("start", {"resumed_from": 40}),
        *(("step", fields) for fields in list(steps(60))[40:]),
    )
    data = report_data(run)
    assert [step["step"] for step in data["steps"]] == list(range(1, 61))
    assert data["incidents"] == [{"kind": "resumed", "step": 40, "message": "resumed from the checkpoint of step 40"}]


def test_a_torn_line_is_reported(run):
    (run / "events.jsonl").write_bytes(b'{"type":"start"}\n{"type":"st')
    assert "1 line(s) of the event log could not be read" in write_report(run).read_text()


def test_the_page_is_written_to_out_and_replaces_an_older_one(finished_run, tmp_path):
    out = tmp_path / "deep" / "page.html"
    assert write_report(finished_run, out) == out
    first = out.read_bytes()
    assert write_report(finished_run, out).read_bytes().startswith(first[:100])
    assert list(out.parent.iterdir()) == [out]


def test_a_page_that_cannot_be_written_is_a_user_error(finished_run, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        write_report(finished_run, tmp_path / "taken")
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a run"):
        write_report(tmp_path)


def test_files_that_are_not_html_are_not_replaced(tmp_path: Path) -> None:
    """Such as the lock of a run."""
    lock = tmp_path / "lock.json"
    lock.write_text("{}")
    with pytest.raises(UserError, match="not an HTML page"):
        write_page(lock, "<!doctype html>")
    assert lock.read_text() == "{}"
    for content in ("", "<!DOCTYPE html> old", "<html>"):
        (tmp_path / "page.html").write_text(content)
        write_page(tmp_path / "page.html", "<!doctype html>")
        assert (tmp_path / "page.html").read_text() == "<!doctype html>"


def test_links_and_pipes_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to("target.html")
    write_page(tmp_path / "link.html", "<!doctype html>")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "target.html").read_text() == "<!doctype html>"
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_page(tmp_path / "pipe", "<!doctype html>")
    assert os.read(end, 100) == b"<!doctype html>"
    os.close(end)
    assert (tmp_path / "pipe").is_fifo()
