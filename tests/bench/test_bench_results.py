"""How the figures of a benchmark are computed and shown."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pages import markdown
from benchmarks.pictures import draw
from benchmarks.record import KNOWN_DIRTY, dirty_rows, read_result
from redline.bench import throughput
from redline.bench.child import ChildError, TrainedRun
from redline.bench.record import file_for
from redline.bench.throughput import card_figures, why_not_fp8
from redline.hardware.machine import Machine
from redline.runs.breakdown import covered
from redline.runs.events import History
from redline.training import trial as kernels
from redline.training.trial import Busy, kernel_time

ROOT = Path(__file__).parents[2]
H200 = Machine("cuda", "NVIDIA H200", 150 << 30, 16, (9, 0), fast_bf16=True)


def reading(step: int, **fields: Any) -> dict[str, Any]:
    counted = {"energy_j": 1e6 + 400.0 * step, "time": 100 + 0.6 * step}
    return {"step": step, "power_w": 650.0, "sm_clock_mhz": 1500.0, **counted, **fields}


def test_energy_is_what_the_cards_counter_says_between_two_readings() -> None:
    figures = card_figures([reading(step) for step in (10, 20, 30)], 131_072)
    assert figures["joules_per_step"] == pytest.approx(400)
    assert figures["joules_per_token"] == pytest.approx(400 / 131_072)
    assert figures["power_w"] == pytest.approx(400 / 0.6), "by the counter, not by samples of it"
    assert figures["sm_clock_mhz"] == 1500


@pytest.mark.parametrize(
    "readings",
    [
        [reading(10)],
        [reading(step, energy_j=None) for step in (10, 20, 30)],
        [reading(step, energy_j=5.0) for step in (10, 20)],  # stands still
        [reading(10), reading(20, energy_j=1.0)],  # began again
        [{"step": step, "time": 1.0} for step in (1, 2)],
        [],
    ],
)
def test_without_a_counter_there_are_no_joules(readings: list[dict[str, Any]]) -> None:
    figures = card_figures(readings, 1024)
    assert figures["joules_per_step"] is figures["joules_per_token"] is None
    assert figures["power_w"] in (650.0, None)


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(spans)
def test_overlapping_kernels_are_counted_once(given_spans: list[tuple[int, int]]) -> None:
    ticks = {tick for start, end in given_spans for tick in range(start, end)}
    assert covered(given_spans) == len(ticks)


def test_kernels_are_told_from_copies_and_named_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.autograd import DeviceType

    def event(name: str, start: float, end: float, kind: Any = DeviceType.CUDA, annotation: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=kind, is_user_annotation=annotation)

    events = [
        event("gemm", 0, 400_000),
        event("triton", 300_000, 500_000),  # on another stream
        event("Memcpy HtoD", 500_000, 900_000),
        event("Optimizer.step", 0, 1_000_000, annotation=True),
        event("cudaLaunchKernel", 0, 1_000_000, DeviceType.CPU),
    ]

    class Profile:
        def __init__(self, activities: Any) -> None: ...
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def events(self) -> Any:
            return events

    clock = iter((0.0, 1.0))
    monkeypatch.setattr("torch.profiler.profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(clock))
    busy = kernel_time(lambda: None, torch.device("cuda"))
    assert busy == Busy(kernels=0.5, wall=1.0)
    assert busy.share == 0.5


def test_a_cpu_has_no_kernels_to_time() -> None:
    assert kernel_time(lambda: pytest.fail("ran for nothing"), torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("precision", "choice", "reason"),
    [
        ("fp8", ("train.fp8", "native: qkv, up", "measured"), None),
        ("fp8", ("model.kernels", "fused", ""), None),
        ("fp8", ("train.fp8", "none", "all are slower"), "all are slower"),
        ("bf16", ("train.precision", "bf16", "no fp8 units"), "no fp8 units"),
    ],
)
def test_a_row_named_fp8_computed_in_fp8(precision: str, choice: tuple[str, str, str], reason: str | None) -> None:
    message = why_not_fp8(precision, [dict(zip(("key", "value", "reason"), choice, strict=True))])
    assert reason in message if reason and message else message is None and reason is None


def a_run(precision: str, chosen: str) -> TrainedRun:
    """Return the parts of a GPU run's log and lock that a row is made of."""
    step = {"tokens_per_s": 1e5, "mfu": 0.5, "mfu_causal": 0.4, "step_ms": 600.0, "data_wait_ms": 0.3, "loss": 9.0}
    events: list[Any] = [
        {
            "type": "plan",
            "choices": [{"key": "train.fp8", "value": chosen, "reason": "measured"}],
            "warnings": ["little data"],
            "ceiling": {"tokens_per_s": 400_000},
        },
        {"type": "recovery", "message": "out of memory: micro-batch 128 → 64"},
        *({"type": "step", "memory_gib": 90.0, **step, **reading(n)} for n in (10, 20, 30)),
    ]
    recipe = {"train": {"precision": precision, "compile": True}, "model": {"kernels": "fused"}}
    batch = {"micro": 128, "tokens_per_step": 131_072}
    lock = {"recipe": recipe, "batch": batch, "machine": {"device": "cuda"}, "data": {"vocab_size": 5}}
    return TrainedRun(0.0, History(events), lock)


def test_a_row_on_a_gpu_has_energy_clock_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def ask(module: str, request: Any) -> dict[str, Any]:
        requests.append((module, request))
        return {"tokens_per_s": 1.0, "kernel_ms": 590.0, "kernel_share": 0.98}

    monkeypatch.setattr(throughput, "ask", ask)
    row = throughput._measure(throughput.CONTENDERS[1], a_run("fp8", "native: qkv"))
    assert throughput._figures(a_run("bf16", "none"))["kernels"] == "fused", "not what torch compiled"
    assert (row["joules_per_step"], row["sm_clock_mhz"], row["kernel_share"]) == (pytest.approx(400), 1500, 0.98)
    assert row["data_wait_share"] == pytest.approx(0.0005)
    assert row["tokens_per_s"] == 1e5, "the trial's speed is not the loop's"
    assert row["warnings"] == ["little data", "out of memory: micro-batch 128 → 64"]
    ((module, request),) = requests
    assert module == "redline.training.trial"
    assert request["profile"] == 3

    def fail(module: str, request: Any) -> dict[str, Any]:
        raise ChildError("no room.")

    monkeypatch.setattr(throughput, "ask", fail)
    row = throughput._measure(throughput.CONTENDERS[0], a_run("bf16", "none"))
    assert (row["profile_error"], row["tokens_per_s"]) == ("no room.", 1e5), "what was timed is kept"


@pytest.mark.parametrize(("precision", "chosen"), [("bf16", "native: qkv"), ("fp8", "none")])
def test_a_row_called_fp8_has_no_bf16_figure(precision: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "ask", lambda *_: {})
    with pytest.raises(ChildError, match="fp8"):
        throughput._measure(throughput.CONTENDERS[1], a_run(precision, chosen))


def result(**fields: Any) -> dict[str, Any]:
    figures = {"mfu": 0.596, "step_ms": 535.0, "power_w": 690.0, "joules_per_step": 369.0, "joules_per_token": 0.0028}
    common = {"what": "a loop", "precision": "bf16", "compiled": True, "ceiling_tokens_per_s": 439_000, **figures}
    rows = [
        {"name": "redline", "tokens_per_s": 245_000.0, "redline_is": 1.0, **common},
        {"name": "redline-fp8", "what": "fp8", "error": "no\nunits"},
        {"name": "plain", "tokens_per_s": 203_000.0, "redline_is": 1.2, **common, "warnings": ["going on uncompiled"]},
    ]
    return {
        "benchmark": "throughput",
        "date": "2026-11-15",
        "recipe": "pretrain-350m",
        "overrides": ["train.steps=100"],
        "machine": H200.facts(),
        "versions": {"torch": "2.11.0"},
        "git": {"commit": "abcdef1234", "dirty": True},
        "rows": rows,
        **fields,
    }


def test_a_page_has_the_table_and_what_it_was_measured_with() -> None:
    page = markdown(result(), "t.svg")
    assert page.startswith("# bench throughput: NVIDIA H200, 2026-11-15\n\n![tokens per second](t.svg)")
    assert "| plain: a loop | bf16, compiled | 203,000 | 59.6% | 535.0 | – | 690 | 369.0 | 2.800 |" in page
    assert "- redline-fp8: no figure. no units" in page
    assert "- plain: going on uncompiled." in page
    for part in ("NVIDIA H200, 150.0 GiB, 16 cores", "torch 2.11.0", "`abcdef1234`, with uncommitted changes"):
        assert part in page
    assert "`pretrain-350m train.steps=100`" in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    width = table[0].count("|")
    assert {line.count("|") for line in table[: 2 + len(result()["rows"])]} == {width}


def test_the_picture_of_throughput_is_complete_and_deterministic() -> None:
    svg = draw(result())
    assert svg is not None
    ElementTree.fromstring(svg)
    assert svg == draw(result())
    assert "<text" not in svg, "letters are paths: no font decides how it looks"
    assert draw(result(rows=[{"name": "redline", "error": "no"}])) is None
    assert draw(result(benchmark="startup")) is None


def test_the_picture_of_plan_accuracy_takes_any_error_and_any_gap() -> None:
    old = json.loads((ROOT / "benchmarks/results/plan-h200-20261115.json").read_text(encoding="utf-8"))
    new = copy.deepcopy(old)
    new["rows"][0]["planned"]["tokens_per_s"] = None
    new["rows"][1]["measured"]["memory_gib"] = None
    new["rows"][2]["planned"]["memory_gib"] = 1.0  # far beyond the axis
    new["rows"].append({"name": "fp8", "case": "fp8", "planned": {}, "error": "no units"})
    for rows in (old, new):
        svg = draw({**rows, "benchmark": "plan-accuracy"})
        assert svg is not None
        ElementTree.fromstring(svg)


def test_a_folder_gets_a_file_by_benchmark_card_and_day(tmp_path: Path) -> None:
    path = file_for(tmp_path, "throughput", H200)
    assert path is not None
    assert path.parent == tmp_path
    assert path.name.startswith("throughput-h200-20")
    unknown = file_for(tmp_path, "startup", Machine("cuda", "NVIDIA X1 (80 GB)", 80 << 30, 8, (9, 0)))
    assert unknown is not None
    assert unknown.name.startswith("startup-nvidia-x1-80-gb-20")
    assert file_for(None, "startup", H200) is None


def picture(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/studies/picture.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_committed_results_become_one_picture(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(result(git={"commit": "abcdef1234", "dirty": False})))
    committed = str(ROOT / "benchmarks/results/pretrain-350m-h200-20261115.json")
    done = picture(str(tmp_path / "out.svg"), str(tmp_path / "t.json"), committed)
    assert done.returncode == 0, done.stderr
    ElementTree.parse(tmp_path / "out.svg")
    cpu = Machine("cpu", "a CPU", 8 << 30, 2).facts()
    (tmp_path / "cpu.json").write_text(json.dumps(result(machine=cpu, git={})))
    done = picture(str(tmp_path / "no.svg"), str(tmp_path / "cpu.json"), committed)
    assert done.returncode == 1
    assert "one machine per picture" in done.stderr
    assert not (tmp_path / "no.svg").exists()


def test_time_to_loss_is_plotted_for_one_text_only(tmp_path: Path) -> None:
    committed = ROOT / "benchmarks/results/race-h200-20261118.json"
    done = picture(str(tmp_path / "out.svg"), str(committed))
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "out.svg").read_text(encoding="utf-8")
    ends = sorted(re.findall(r"(\d+) s: nanogpt ends at", drawn))
    assert ends == ["120", "480"], "the second text's 120 s are another race"
    refused = picture(str(tmp_path / "no.svg"), str(committed), str(committed))
    assert (refused.returncode, "time-to-loss" in refused.stderr) == (1, True)
    (tmp_path / "list.json").write_text("[]")
    unlike = picture(str(tmp_path / "no.svg"), str(tmp_path / "list.json"))
    assert (unlike.returncode, unlike.stderr.startswith("A result lacks")) == (1, True)


def test_results_of_uncommitted_code_become_no_picture(tmp_path: Path) -> None:
    committed = ROOT / "benchmarks/results/race-h200-20261118.json"
    race = json.loads(committed.read_text(encoding="utf-8"))
    assert len(dirty_rows(race)) > 5, "the reason why the file is listed by its digest"
    changed = tmp_path / committed.name
    changed.write_text(json.dumps(race))
    for script, words in (("picture", []), ("plan_table", []), ("expect", ["1e9"])):
        command = [sys.executable, "-m", f"benchmarks.studies.{script}"]
        out = [] if script == "expect" else [str(tmp_path / "out.svg")]
        done = subprocess.run(
            [*command, *out, str(changed), *words], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
        )
        assert done.returncode == 1, script
        assert changed.name in done.stderr
        assert "--allow-dirty" in done.stderr
        assert not (tmp_path / "out.svg").exists()
    assert picture("--allow-dirty", str(tmp_path / "out.svg"), str(changed)).returncode == 0
    (tmp_path / "t.json").write_text(json.dumps(result(git={"commit": "abc", "dirty": True})))
    assert picture(str(tmp_path / "t.svg"), str(tmp_path / "t.json")).returncode == 1


def test_a_row_is_as_dirty_as_the_tree_it_was_measured_in() -> None:
    dirty, clean = {"commit": "a", "dirty": True}, {"commit": "b", "dirty": False}
    rows = [
        {"name": "of the call"},
        {"name": "earlier", "from": {"git": dirty}},
        {"name": "run", "lock": {"git": clean}},
    ]
    assert dirty_rows({"git": clean, "rows": rows}) == ["earlier"]
    assert dirty_rows({"git": dirty, "rows": rows}) == ["of the call", "earlier"]
    assert dirty_rows({"lock": {"git": dirty}}) == ["its run"]
    assert dirty_rows({"git": "abc", "arms": {}}) == dirty_rows([]) == []


def test_every_dirty_result_that_is_committed_is_listed() -> None:
    """A new one cannot be added: the list ends with the decision to refuse them."""
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        assert read_result(path) is not None
        is_dirty = bool(dirty_rows(json.loads(path.read_text(encoding="utf-8"))))
        assert is_dirty == (path.name in KNOWN_DIRTY), path.name


def test_without_a_row_of_redline_there_are_no_ratios() -> None:
    """With `--only plain` the first row is not redline."""
    rows: list[Any] = [{"name": "plain", "tokens_per_s": 2.0}, {"name": "transformers", "tokens_per_s": 1.0}]
    assert throughput.add_ratios(rows) == rows
    ours = {"name": "redline", "tokens_per_s": 3.0}
    assert [row["redline_is"] for row in throughput.add_ratios([*rows, ours])] == [1.5, 3.0, 1.0]
