"""The report's summary, the plan beside measured figures, the timeline, and the commands that repeat a run."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.recipe.load import load
from redline.runs.events import EventLog
from redline.runs.report.figures import draw_timeline, time_unit, timeline
from redline.runs.report.page import PlanRow, how_to_repeat, report_data, write_report
from redline.runs.roofline import Bar, Roofline, data_wait_share, largest_gap
from redline.runs.summary import dollars, ending, gap_sentence, totals
from redline.vocabulary import Status, status_of_stop

PLAN: dict[str, Any] = {
    "gpus": 1,
    "throughput": {"tokens_per_s": 1000, "mfu": 0.5, "mfu_causal": 0.4, "source": "prior: a <table>"},
    "batch": {"tokens_per_step": 500},
    "memory_gib": {"peak": 10.0},
    "horizon": {"steps": 100, "tokens": 50_000},
    "ceiling": {
        "tokens_per_s": 2000,
        "limits": [
            {"part": "matmul", "ms_per_step": 250.0, "ms_at_peak": 200.0},
            {"part": "attention", "ms_per_step": 200.0, "ms_at_peak": 50.0},
            {"part": "memory-bound", "ms_per_step": 60.0, "ms_at_peak": None},
        ],
    },
    "hours": 0.01,
    "cost_usd": 2.0,
}
STEP = {
    "tokens_per_s": 900.0,
    "mfu": 0.45,
    "mfu_causal": 0.36,
    "step_ms": 500.0,
    "data_wait_ms": 10.0,
    "memory_gib": 11.0,
}


def steps(count: int, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            "step",
            {"step": n, "tokens": 500 * n, "loss": 5 - n / 50, "hours": n / 3600, "cost_usd": n / 50, **STEP, **fields},
        )
        for n in range(1, count + 1)
    ]


def write(run: Path, *events: tuple[str, dict[str, Any]], lock: dict[str, Any] | None = None) -> Path:
    """Write a run whose events are one second apart."""
    run.mkdir(exist_ok=True)
    (run / "lock.json").write_text(json.dumps(lock or {"recipe_name": "mine", "machine": {"name": "NVIDIA H200"}}))
    clock = iter(range(1000, 100_000))
    log = EventLog(run / "events.jsonl", clock=lambda: float(next(clock)))
    for kind, fields in events:
        log.emit(kind, **fields)
    log.close()
    return run


FINISHED = (
    ("start", {"resumed_from": None}),
    ("plan", PLAN),
    *steps(100),
    ("eval", {"step": 100, "loss": 2.5, "exact_match": 0.25}),
    ("stop", {"reason": "steps", "step": 100, "tokens": 50_000, "hours": 100 / 3600, "cost_usd": 2.0}),
)


def test_the_summary_states_loss_time_cost_speed_and_the_largest_gap(tmp_path: Path) -> None:
    summary = report_data(write(tmp_path / "run", *FINISHED))["verdict"]
    assert summary.startswith("Reached validation loss 2.5 in 1m40s on 50k tokens for $2.00 at 45.0 % MFU.")
    assert (
        "90 % of the planned speed (50 % over the whole run) and 90 % of the speed with the best known kernels"
        in summary
    )
    even = (*FINISHED[:-1], ("stop", {"reason": "steps", "step": 100, "tokens": 50_000, "hours": 55 / 3600}))
    summary_of_even = report_data(write(tmp_path / "even", *even))["verdict"]
    assert "90 % of the planned speed and 90 % of" in summary_of_even, (
        "the share over the whole run only where it differs"
    )
    assert "aiting for data took 2.0 % of the time" in summary
    assert "attention kernels (30 % of a step)" in summary, "150 of 500 ms: the largest gap"


def test_the_best_loss_is_stated_if_the_last_is_worse(tmp_path: Path) -> None:
    events = (*FINISHED[:-2], ("eval", {"step": 60, "loss": 2.0}), ("eval", {"step": 100, "loss": 2.5}), FINISHED[-1])
    assert "its best was 2." in report_data(write(tmp_path / "run", *events))["verdict"]
    assert "its best was" not in report_data(write(tmp_path / "other", *FINISHED))["verdict"]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (None, "Crashed at step 40 of 100: the log ends without a stop event. It had reached"),
        ("preempted", "Preempted at step 40 of 100"),
        ("nonfinite losses", "Failed at step 40 of 100: nonfinite losses."),
    ],
)
def test_a_run_that_ended_early_states_how_and_the_command_to_resume(
    tmp_path: Path, reason: str | None, words: str
) -> None:
    stop = [("stop", {"reason": reason, "step": 40})] if reason else []
    run = write(tmp_path / "my run", ("start", {}), ("plan", PLAN), *steps(40), *stop)
    data = report_data(run)
    assert data["verdict"].startswith(words)
    assert shlex.split(data["resume"]) == ["redline", "train", "--resume", str(run)]
    assert "--resume" in write_report(run).read_text()


def test_a_run_without_measurements_has_a_summary(tmp_path: Path) -> None:
    data = report_data(write(tmp_path / "run", ("start", {})))
    assert data["verdict"] == "Crashed before anything was measured: the log ends without a stop event."
    assert data["planned"] == []


def test_incidents_are_counted(tmp_path: Path) -> None:
    trouble = (("recovery", {"message": "a"}), ("recovery", {"message": "b"}), ("warning", {"message": "c"}))
    summary = report_data(write(tmp_path / "run", *FINISHED[:-1], *trouble, FINISHED[-1]))["verdict"]
    assert summary.endswith("2 recoveries, 1 warning.")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"throttle": "power_cap"}, "limited by the GPU's power limit"),
        ({"throttle": "thermal"}, "limited by heat"),
        ({"data_wait_ms": 100.0}, "limited by data loading"),
    ],
)
def test_a_limit_other_than_the_kernels_is_stated(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    summary = report_data(write(tmp_path / "a", FINISHED[0], FINISHED[1], *steps(100, **fields), *FINISHED[-2:]))[
        "verdict"
    ]
    assert words in summary
    assert "limited by" not in report_data(write(tmp_path / "b", *FINISHED))["verdict"]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(1e-3, 1e4)), min_size=1, max_size=20))
def test_the_share_of_waiting_is_of_all_time(pairs: list[tuple[float, float]]) -> None:
    events = [{"data_wait_ms": wait, "step_ms": wait + work} for wait, work in pairs]
    share = data_wait_share([*events, {"step_ms": 5.0}, {"data_wait_ms": None}])
    assert share == pytest.approx(sum(w for w, _ in pairs) / sum(w + s for w, s in pairs))
    assert 0 <= share <= 1


@pytest.mark.parametrize(
    ("step_ms", "words"),
    [
        (500.0, "attention"),
        (900.0, "memory-bound work and other time outside these kernels (50 % of a step)"),
        (255.0, "near the dense peak"),
    ],
)
def test_the_largest_gap_is_where_most_time_above_the_peak_is(step_ms: float, words: str) -> None:
    best = {"matmul": 250.0, "attention": 200.0} if step_ms > 300 else {"matmul": 205.0, "attention": 50.0}
    bars = [
        Bar("dense peak", {"matmul": 200.0, "attention": 50.0}),
        Bar("best kernels", best, {"memory-bound": 60.0}),
    ]
    assert words in gap_sentence(Roofline(bars, step_ms, 0.5, None, None, [], []))
    assert largest_gap(Roofline(bars[1:], step_ms, 0.5, None, None, [], [])) is None, "without a peak there is no gap"


def test_a_small_cost_is_not_shown_as_zero() -> None:
    assert (dollars(0.0), dollars(0.004), dollars(0.25)) == ("$0.00", "less than a cent", "$0.25")


def test_the_plan_is_shown_beside_measured_figures(tmp_path: Path) -> None:
    run = write(tmp_path / "run", *FINISHED)
    rows = {row["what"]: row for row in report_data(run)["planned"]}
    assert (rows["tokens/s"]["planned"], rows["tokens/s"]["measured"], rows["tokens/s"]["share"]) == (1000, 900, 0.9)
    assert rows["ms per step"]["share"] == pytest.approx(1.0)
    assert rows["peak memory"]["share"] == pytest.approx(1.1)
    assert rows["training time"]["share"] == pytest.approx(100 / 3600 / 0.01)
    page = write_report(run).read_text()
    assert '<td>peak memory</td><td class="number">10.0 GiB</td><td class="number"><b>11.0 GiB</b></td>' in page
    assert "prior: a &lt;table&gt;" in page


def test_with_train_hours_the_expected_tokens_are_the_plan(tmp_path: Path) -> None:
    plan = {**PLAN, "horizon": {"steps": 9000, "tokens": 4_500_000, "expected_tokens": 40_000}}
    rows = {
        r["what"]: r for r in report_data(write(tmp_path / "r", FINISHED[0], ("plan", plan), *FINISHED[2:]))["planned"]
    }
    assert rows["tokens"]["planned"] == 40_000
    assert "steps" not in rows


def test_a_row_without_a_measurement_has_no_share() -> None:
    assert PlanRow("x", 2.0, None, str).cells() == ("x", "2.0", "–", "–")
    assert PlanRow("x", 0.0, 1.0, str).share is None


def test_evaluations_have_a_table_with_every_metric(tmp_path: Path) -> None:
    page = write_report(write(tmp_path / "run", *FINISHED)).read_text()
    assert '<th class="number">exact match</th>' in page
    assert '<td class="number">0.25</td>' in page


# --- the timeline


def test_the_timeline_leaves_out_the_time_between_attempts() -> None:
    events = [
        {"type": "start", "time": 100.0, "resumed_from": None},
        {"type": "step", "time": 110.0, "step": 5},
        {"type": "checkpoint", "time": 112.0, "step": 5, "bytes": 1 << 20, "seconds": 1.0},
        {"type": "start", "time": 9112.0, "resumed_from": 5},
        {"type": "warning", "time": 9117.0, "message": "hot\n<b>"},
        {"type": "step", "time": 9120.0, "step": 9, "skipped": 2},
        {"type": "eval", "time": 9119.0, "step": 9, "loss": 1.5},
        {"type": "stop", "time": 9121.0, "reason": "steps"},
    ]
    moments = [(m.kind, m.seconds, m.step, m.message) for m in timeline(events)]
    assert moments == [
        ("begin", 0.0, None, "started"),
        ("checkpoint", 12.0, 5, "1.0 MiB in 1.0s"),
        ("begin", 12.0, 5, "resumed from the checkpoint of step 5"),
        ("warning", 17.0, 5, "hot <b>"),
        ("skipped", 20.0, 9, "2 updates skipped: a loss or gradient was not finite"),
        ("evaluation", 20.0, 9, "validation loss 1.5000"),
        ("stop", 22.0, 9, "reached the last step"),
    ]
    figure = draw_timeline(timeline(events))
    assert figure is not None
    ElementTree.fromstring(figure.svg)
    assert "begin × 2" in figure.svg
    assert "seconds of work" in figure.svg


def test_a_long_timeline_stays_a_small_figure() -> None:
    events = [{"type": "eval", "time": float(n), "step": n, "loss": 1.0} for n in range(20_000)]
    figure = draw_timeline(timeline([{"type": "start", "time": 0.0}, *events]))
    assert figure is not None
    assert len(figure.svg) < 60_000
    assert "evaluation × 20000" in figure.svg


@given(st.lists(st.fixed_dictionaries({"type": st.sampled_from(["start", "step", "eval", "stop", "plan", "x"])},
    optional={"time": st.one_of(st.none(), st.floats(-1e9, 1e12)), "step": st.integers(0, 99)})))  # fmt: skip
def test_any_log_has_a_timeline_in_order(events: list[dict[str, Any]]) -> None:
    seconds = [moment.seconds for moment in timeline(events)]
    assert seconds == sorted(seconds)
    assert all(second >= 0 for second in seconds)


def test_units_of_time_suit_their_length() -> None:
    assert [time_unit(s)[1] for s in (10, 600, 7200, 86_400, 1e6)] == ["seconds", "minutes", "minutes", "hours", "days"]


# --- how to repeat a run


def locked(name: str, *overrides: str, **fields: Any) -> dict[str, Any]:
    recipe = load("quickstart", list(overrides)).recipe.model_dump(mode="json")
    return {"recipe_name": name, "recipe": recipe, "git": {"commit": "abc", "dirty": True}, **fields}


def test_a_shipped_recipe_is_repeated_by_name_overrides_and_commit() -> None:
    overrides = ["train.steps=7", "eval.prompt=a  'b'"]
    lock = locked("quickstart", *overrides)
    found = how_to_repeat(lock, [{"overrides": overrides}], [{"gpus": 4}], "runs/r")
    assert found.commands[0] == "git checkout abc"
    assert shlex.split(found.commands[1]) == ["redline", "train", "quickstart", *overrides, "--gpus", "4"]
    assert load("quickstart", shlex.split(found.commands[1])[3:5]).recipe.eval.prompt == "a  'b'"
    assert found.remarks == ["The code had uncommitted changes."]


def test_a_file_of_the_same_name_is_not_taken_for_the_shipped_recipe() -> None:
    lock = locked("quickstart")
    lock["recipe"]["train"]["optimizer"] = "something else"
    found = how_to_repeat(lock, [{"overrides": ["train.steps=7"]}], [], "runs/r")
    assert found.commands[1] == "redline train quickstart.yaml"
    assert "resolved recipe below" in " ".join(found.remarks)


def test_overrides_of_a_resume_are_repeated() -> None:
    starts = [{"overrides": []}, {"overrides": []}, {"overrides": ["train.steps=90"]}]
    found = how_to_repeat(locked("quickstart"), starts, [], "runs/a b")
    assert found.commands[1:] == [
        "redline train quickstart --run 'runs/a b-again'",
        "redline train --resume 'runs/a b-again' train.steps=90",
    ]


def test_without_a_recipe_there_is_no_command(tmp_path: Path) -> None:
    assert how_to_repeat({}, [], [], "r").commands == []
    odd = {"recipe_name": 5, "git": [], "recipe": {"a": []}}
    assert how_to_repeat(odd, [{"overrides": {"x": 1}}], [], "r").commands == ["redline train 5.yaml"]


def test_the_commands_can_be_copied_and_are_escaped(tmp_path: Path) -> None:
    lock = locked("quickstart", "eval.prompt=<b>&")
    run = write(tmp_path / "run", ("start", {"overrides": ["eval.prompt=<b>&"]}), *steps(3), lock=lock)
    page = write_report(run).read_text()
    assert (
        '<pre class="copy">git checkout abc\nredline train quickstart &#39;eval.prompt=&lt;b&gt;&amp;&#39;</pre>'
        in page
    )
    assert "user-select: all" in page


def test_a_resume_with_another_number_of_gpus_is_repeated_with_it() -> None:
    starts = [{"overrides": []}, {"overrides": ["train.steps=80"]}, {"overrides": []}, {"overrides": []}]
    plans = [{"gpus": 2}, {"gpus": 3}, {"gpus": 3}, {"gpus": 1}]
    found = how_to_repeat(locked("quickstart"), starts, plans, "runs/two").commands
    assert [line for line in found if line.startswith("redline")] == [
        "redline train quickstart --gpus 2 --run runs/two-again",
        "redline train --resume runs/two-again train.steps=80 --gpus 3",
        "redline train --resume runs/two-again",
    ]


def test_a_warning_before_the_start_event_of_a_resume_adds_no_work() -> None:
    """A resumed run may warn before it writes its start event."""
    log = [("start", 0.0), ("stop", 5.0), ("warning", 3600.0), ("start", 3600.1), ("stop", 3604.1)]
    events = [{"type": kind, "time": time, "message": "", "reason": "steps", "step": 1} for kind, time in log]
    moments = timeline(events)
    assert [round(moment.seconds, 3) for moment in moments] == [0.0, 5.0, 5.0, 5.0, 9.0]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"reason": "hours"}, "finished: reached train.hours"),
        ({"reason": "reached 60 steps"}, "finished: reached 60 steps"),
        ({"reason": "steps", "saved": False}, "failed: the last state was not saved (reached the last step)"),
        ({"reason": "damaged_data", "saved": False}, "failed: a file of the training data is damaged"),
        ({"reason": None}, "finished"),
        (None, "crashed: the log ends without a stop event"),
    ],
)
def test_the_end_of_a_run_in_one_phrase(stop: dict[str, Any] | None, expected: str) -> None:
    assert ending(Status.CRASHED if stop is None else status_of_stop(stop), stop) == expected


def test_the_totals_of_a_run() -> None:
    stop = {"step": 628, "tokens": 1_290_000, "hours": 119 / 3600, "cost_usd": None}
    assert totals(stop) == "628 steps · 1.29M tokens · 1m59s"
    assert totals({}) == ""
