"""The roofline of a step: ceilings of the plan, what limits the step, and the figures drawn of it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import live_logs
import pytest

from redline.hardware.machine import Machine
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, resolve
from redline.runs.events import EventLog
from redline.runs.report.figures import draw_roofline
from redline.runs.report.page import report_data, write_report
from redline.runs.roofline import LimitKind, analyse, step_points, step_roofs
from redline.runs.summary import limit_sentences

RESULT = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/pretrain-350m-h200-20261115.json").read_text(encoding="utf-8")
)
H200 = Machine("cuda", "NVIDIA H200", 150_109_880_320, 16, (9, 0), fast_bf16=True)
FACTS = DataFacts(50257, 37_900_000, 731_211, "", "gpt2", "")


def planned(machine: Machine = H200, *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan event and the lock of pretrain-350m on a machine."""
    resolved = resolve(load("pretrain-350m", list(overrides)).recipe, machine, FACTS)
    return resolved.plan_event(), {
        "recipe": resolved.recipe.model_dump(mode="json"),
        "machine": machine.facts(),
    }


def lines(count: int = 12, **fields: Any) -> list[dict[str, Any]]:
    """Return step events with the committed figures of an H200; `fields` replace some of them."""
    shown = {key: RESULT[key] for key in ("tokens_per_s", "mfu", "step_ms", "data_wait_ms", "power_w")}
    card = {"sm_clock_mhz": 1485.0, "throttle": ""}
    return [{"type": "step", "step": step, **shown, **card, **fields} for step in range(1, count + 1)]


def test_the_bars_hold_the_parts_of_the_plan() -> None:
    plan, lock = planned()
    now = analyse(lines(), plan, lock)
    peak, best = now.bars
    tokens, n_matmul = 131_072, 350_355_456
    assert peak.ms["matmul"] == pytest.approx(1e3 * tokens * 6 * n_matmul / 989e12, rel=1e-3)
    assert peak.total == pytest.approx(1e3 * tokens / plan["ceiling"]["tokens_per_s"], rel=1e-3)
    assert best.total == pytest.approx(1e3 * tokens / plan["ceiling"]["best_kernels_tokens_per_s"], rel=1e-3)
    assert set(best.may_hide) == {"memory-bound"}
    assert now.step_ms == RESULT["step_ms"]
    assert now.planned_ms == pytest.approx(1e3 * tokens / plan["throughput"]["tokens_per_s"])
    assert f"A step takes {now.step_ms:.0f} ms: {now.step_ms / peak.total:.2f} times" in limit_sentences(now)[0]


def test_points_lie_under_their_roofs() -> None:
    plan, lock = planned()
    bandwidth, bf16 = step_roofs(lock)
    assert (bandwidth.rate, bf16.rate) == (4.8e12, 989e12)
    for point in step_points(lock, plan, RESULT["tokens_per_s"]):
        roof = min(bf16.rate, point.flops_per_byte * bandwidth.rate) / 1e12
        assert 0 < point.tflops < roof
    points = {point.name: point for point in step_points(lock, plan, RESULT["tokens_per_s"])}
    assert points["this run"].tflops == pytest.approx(RESULT["mfu_causal"] * 989, rel=1e-3)
    assert points["attention"].flops_per_byte == pytest.approx(1024 / 4), "T/4: each of 12 tensors passes once"
    matrices = {(1024, 3072): 24, (1024, 1024): 24, (1024, 5376): 24, (2688, 1024): 24, (1024, 50304): 1}
    flops = sum(6 * k * n * count for (k, n), count in matrices.items())
    moved = sum(3 * 2 * (k + n + k * n / 131_072) * count for (k, n), count in matrices.items())
    assert points["matmul"].flops_per_byte == pytest.approx(flops / moved)


def test_fp8_adds_its_roof_and_moves_the_matmuls() -> None:
    plan, lock = planned(H200, "train.precision=fp8")
    assert [roof.name for roof in step_roofs(lock)] == ["bandwidth", "bf16", "fp8"]
    narrow = step_points(lock, plan, 300_000.0)[0]
    wide = step_points(*reversed(planned()), 300_000.0)[0]
    assert narrow.tflops > wide.tflops
    assert narrow.flops_per_byte > 1.4 * wide.flops_per_byte


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"throttle": "power_cap"}, LimitKind.POWER, "11 of 11 log lines (median 694 W at 1,485 MHz)"),
        ({"throttle": "power_cap+hw_thermal"}, LimitKind.HEAT, "11 of 11 log lines"),
        ({"throttle": "power_cap", "data_wait_ms": 100.0}, LimitKind.DATA_LOADING, "16% of a step"),
        ({"throttle": ""}, LimitKind.KERNELS, "Neither power nor heat"),
        ({"throttle": None}, LimitKind.KERNELS, "matmul needs "),
        ({"throttle": 7, "power_w": None, "sm_clock_mhz": None}, LimitKind.KERNELS, "matmul needs "),
    ],
)
def test_the_limit_of_a_step_is_found_and_described(fields: dict[str, Any], kind: LimitKind, words: str) -> None:
    found = analyse(lines(**fields), *planned())
    assert found.limit is not None
    assert found.limit.kind is kind
    assert words in limit_sentences(found)[-1]


def test_a_run_that_lacks_cpu_time_is_told_so(tmp_path: Path) -> None:
    starved, busy = (analyse(lines(cpu_share=share), {}, {}) for share in (0.45, 0.93))
    assert starved.limit is not None
    assert (starved.limit.kind, starved.limit.cpu_share) == (LimitKind.CPU_TIME, 0.45)
    assert "45%" in limit_sentences(starved)[-1]
    assert busy.limit is not None
    assert busy.limit.kind is LimitKind.KERNELS
    assert "93%" in limit_sentences(busy)[-1]
    steps = [live_logs.step(number, cpu_share=0.45, data_wait_ms=0.0) for number in range(1, 9)]
    run = live_logs.write_run(tmp_path / "run", [live_logs.start(), *steps])
    data = report_data(run)
    assert "CPU time" in data["verdict"]
    assert any("OMP_NUM_THREADS" in sentence for sentence in data["roofline"]["sentences"])


def test_a_step_near_the_best_kernels_is_limited_by_their_rates() -> None:
    plan, lock = planned()
    best = analyse(lines(), plan, lock).bars[1].total
    near = analyse(lines(throttle=None, step_ms=1.05 * best), plan, lock)
    assert "above all matmul" in limit_sentences(near)[-1]


def test_a_power_limit_that_is_reached_in_few_lines_is_not_the_limit() -> None:
    steps = lines(9)
    for step in steps[:4]:
        step["throttle"] = "power_cap"
    found = analyse(steps, *planned())
    assert found.limit is not None
    assert found.limit.kind is LimitKind.KERNELS


def test_a_cpu_is_compared_with_its_measured_rates() -> None:
    measured = {"fp32": 1e11, "bf16": 0.5e11, "copy": 2e10}
    cpu = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11, measured=measured)
    plan, lock = planned(cpu, "train.global_batch=4", "train.precision=fp32")
    now = analyse(lines(tokens_per_s=30.0, step_ms=136_000.0, mfu=None, throttle=None), plan, lock)
    (bar,) = now.bars
    flops = plan["flops_per_token"]
    assert flops["recomputed"] > 0, "this machine has little memory"
    assert bar.total == pytest.approx(1e3 * 4096 * (flops["executed"] + flops["recomputed"]) / 1e11)
    older = {"executed": 5e9, "useful": 6e9}  # in older logs it includes recomputation
    (bar,) = analyse(lines(step_ms=136_000.0), plan | {"flops_per_token": older}, lock).bars
    assert bar.total == pytest.approx(1e3 * 4096 * 5e9 / 1e11)
    assert [(roof.name, roof.measured) for roof in now.roofs] == [("bandwidth", True), ("fp32", True)]
    assert [point.name for point in now.points] == ["this run"]
    assert "The peak of a CPU is unknown" in limit_sentences(now)[1]
    assert len(draw_roofline(now)) == 2


def test_an_unknown_card_is_compared_with_measured_rates_only() -> None:
    unknown = Machine("cuda", "NVIDIA X1", 80 << 30, 16, (9, 0), fast_bf16=True)
    now = analyse(lines(mfu=None), *planned(unknown))
    assert (now.bars, now.points, draw_roofline(now)) == ([], [], [])
    assert "The peak of NVIDIA X1 is unknown" in limit_sentences(now)[0]
    probed = Machine(
        "cuda", "NVIDIA X1", 80 << 30, 16, (9, 0), fast_bf16=True, measured={"bf16": 7e14, "fp32": 5e13, "copy": 4e12}
    )
    now = analyse(lines(mfu=None), *planned(probed))
    assert [bar.name for bar in now.bars] == ["best kernels"], "a peak derived from measured rates is not the card's"
    assert all(roof.measured for roof in now.roofs)
    assert len(draw_roofline(now)) == 2


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_figures_name_their_parts(precision: str) -> None:
    figures = draw_roofline(analyse(lines(), *planned(H200, f"train.precision={precision}")))
    bars, roofs = (ElementTree.fromstring(figure.svg) for figure in figures)
    words = " ".join("".join(node.itertext()) for tree in (bars, roofs) for node in tree.iter() if node.tag == "text")
    for word in ("dense peak", "best kernels", "this run", "49.6% MFU", "matmul", "memory-bound", "4.8 TB/s"):
        assert word in words
    assert ("fp8 1,979 TFLOP/s" in words) == (precision == "fp8")
    assert not re.search("#0102", "".join(figure.svg for figure in figures)), "the page's colours"


LOCKS: list[Any] = [
    {},
    {"machine": {"name": "NVIDIA H200", "device": "cuda"}},
    {"recipe": {"train": {"precision": "bf16"}}, "machine": {"name": 7, "memory_bytes": "much"}},
    {"recipe": {"objective": "nosuch"}, "machine": H200.facts()},
    {"recipe": {"train": {"precision": "bf16"}}, "machine": H200.facts()},  # never resolved
]
PLANS: list[Any] = [
    {},
    {"ceiling": 5},
    {"ceiling": {"limits": "many", "tokens_per_s": 1}, "batch": {"tokens_per_step": 0, "micro": None}},
    {"ceiling": {"limits": [3, {"part": "matmul"}, {"part": "x", "ms_per_step": 0.0, "ms_at_peak": 0.0}]}, "gpus": 0},
]


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("steps", [[], [{"step": 1}], lines(3), lines(3, step_ms=0.0, tokens_per_s=0)])
def test_incomplete_logs_and_locks_give_what_they_have(lock: Any, plan: Any, steps: Any) -> None:
    now = analyse(steps, plan, lock)
    assert now.points == []
    draw_roofline(now)
    json.dumps(now.data(), allow_nan=False)


def test_the_report_shows_the_roofline(tmp_path: Path) -> None:
    plan, lock = planned()
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 1.75e9)
    log.emit("plan", **plan)
    for step in lines(throttle="power_cap"):
        log.emit(**step)
    log.close()
    page = write_report(tmp_path).read_text()
    assert "<h2>Speed limits</h2>" in page
    assert "<figcaption>A step against its ceilings</figcaption>" in page
    assert "it was reached in 11 of 11 log lines" in page
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    data = json.loads(json.dumps(report_data(tmp_path), allow_nan=False))["roofline"]
    assert [bar["name"] for bar in data["bars"]] == ["dense peak", "best kernels"]
    assert data["points"][-1]["name"] == "this run"
