"""Trackers record what the log holds, and a tracker that fails does not stop the run."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.errors import RecipeError
from redline.recipe.schema import MonitorSection
from redline.runs.events import EventLog, read_events
from redline.runs.monitor import STEP, Monitor, TensorBoard, require_packages, scalars, sinks_for

GUIDES = {"train/loss", "train/throughput", "train/grad_norm", "system/gpu_memory_allocated"}


class RecordingView:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def tick(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a step as a run on a GPU logs them."""
    fields = {
        "step": number,
        "tokens": 1024 * number,
        "loss": 10.0 / number,
        "lr": 3e-4 * number,
        "grad_norm": 0.1 + number / 3,
        "tokens_per_s": 203957.6481252772,
        "mfu": 0.49579291829707794,
        "mfu_causal": 0.4646538144982428,
        "step_ms": 642.6432212999998,
        "data_wait_ms": 0.028969700001368892,
        "memory_gib": 122.787,
        "gpu_util": 99.0,
        "power_w": 693.743,
        "cost_usd": 0.25 * number,
        "hours": 0.1,
    }
    return {**fields, **changes}


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def texts_back(folder: Path) -> dict[str, list[tuple[int, str]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    assert set(reader.PluginTagToContent("text")) == set(reader.Tags()["tensors"]), "shown in the text tab"
    tags = reader.Tags()["tensors"]
    return {t: [(e.step, e.tensor_proto.string_val[0].decode()) for e in reader.Tensors(t)] for t in tags}


def start(monitor: Monitor, resumed_from: int | None = None) -> None:
    monitor.emit("start", schema=1, run_id="0123456789ab", resumed_from=resumed_from)


def test_tensorboard_holds_every_number_of_the_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with Monitor(log, RecordingView(), sinks=[TensorBoard(tmp_path / "tensorboard")]) as monitor:
        start(monitor)
        monitor.emit(
            "plan", parameters={"total": 350_405_632}, choices=[{"key": "train.lr", "value": 1, "reason": "√"}]
        )
        for number in (1, 2, 3):
            monitor.emit("step", **step(number, loss=math.nan if number == 2 else 7.1 / number))
        monitor.emit("eval", step=3, tokens=3072, loss=3.3, perplexity=27.1, bits_per_byte=1.1, em=0.25)
        monitor.emit("sample", step=3, label="after", prompt="def ", text="f():\n    # a *star*")
        monitor.emit("warning", message="nothing to draw")
    expected: dict[str, list[tuple[int, float]]] = {}
    for event in read_events(log.path):
        for key, value in event.items():
            tag = STEP.get(key) if event["type"] == "step" else f"eval/{key}"
            drawn = event["type"] in ("step", "eval") and key not in ("type", "time", "step", "tokens", "hours")
            if drawn and value is not None and tag is not None:
                expected.setdefault(tag, []).append((event["step"], float(np.float32(value))))
    got = read_back(tmp_path / "tensorboard")
    assert got == expected
    assert got.keys() >= GUIDES | {"train/mfu_causal", "eval/bits_per_byte", "system/power_w", "cost/usd", "eval/em"}
    assert [s for s, _ in got["train/loss"]] == [1, 3], "a loss that is not finite is not drawn"
    texts = texts_back(tmp_path / "tensorboard")
    assert texts["sample/after"] == [(3, "    def f():\n        # a *star*")]
    assert "350.4M parameters" in texts["plan"][0][1]
    assert "train.lr = 1" in texts["plan"][0][1]


def test_a_resumed_run_shows_no_step_twice(tmp_path: Path) -> None:
    """Killed after step 7, resumed from 4, killed after 6, resumed from 4 again: all within a second."""
    for resumed_from, last, offset in ((None, 7, 0.0), (4, 6, 100.0), (4, 9, 200.0)):
        with Monitor(
            EventLog(tmp_path / "events.jsonl"), RecordingView(), sinks=[TensorBoard(tmp_path / "tensorboard")]
        ) as monitor:
            start(monitor, resumed_from)
            for number in range((resumed_from or 0) + 1, last + 1):
                monitor.emit("step", **step(number, loss=offset + number))
    shown = read_back(tmp_path / "tensorboard")["train/loss"]
    assert shown == [(n, float(n)) for n in range(1, 5)] + [(n, 200.0 + n) for n in range(5, 10)]
    logged = [(e["step"], e["loss"]) for e in read_events(tmp_path / "events.jsonl") if e["type"] == "step"]
    assert shown == logged
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


def test_a_torn_record_loses_only_itself(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.event({"type": "start", "time": 1.0, "resumed_from": None})
    for number in (1, 2):
        sink.event({"type": "step", "time": 1.0, **step(number)})
    sink.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    later = TensorBoard(tmp_path)
    later.event({"type": "start", "time": 1.0, "resumed_from": 1})
    later.event({"type": "step", "time": 1.0, **step(2)})
    later.close()
    assert [s for s, _ in read_back(tmp_path)["train/loss"]] == [1, 2]


class Broken:
    def __init__(self, error: Exception, kinds: set[str]) -> None:
        self.error, self.kinds, self.seen = error, kinds, 0

    def event(self, event: dict[str, Any]) -> None:
        self.seen += 1
        if event["type"] in self.kinds:
            raise self.error

    def close(self) -> None:
        if "close" in self.kinds:
            raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "OSError: No space left on device"),
        (ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard"), "no module tensorboard"),
        (RuntimeError("key 5ecret was refused"), "(RuntimeError)"),
    ],
)
def test_a_failing_tracker_is_reported_once_and_switched_off(tmp_path: Path, error: Exception, words: str) -> None:
    view, broken, fine = RecordingView(), Broken(error, {"step", "warning", "close"}), TensorBoard(tmp_path / "tb")
    with Monitor(EventLog(tmp_path / "events.jsonl"), view, sinks=[broken, fine]) as monitor:
        start(monitor)
        for number in (1, 2, 3):
            monitor.emit("step", **step(number))
    warnings = [e["message"] for e in view.events if e["type"] == "warning"]
    assert len(warnings) == 1
    assert words in warnings[0]
    assert "Broken is switched off" in warnings[0]
    assert "5ecret" not in warnings[0]
    assert broken.seen == 2
    assert [s for s, _ in read_back(tmp_path / "tb")["train/loss"]] == [1, 2, 3]


def test_a_tracker_that_fails_to_close_does_not_damage_the_log(tmp_path: Path) -> None:
    view = RecordingView()
    with Monitor(EventLog(tmp_path / "e.jsonl"), view, sinks=[Broken(RuntimeError(), {"close"})]) as monitor:
        start(monitor)
    assert [e["type"] for e in read_events(tmp_path / "e.jsonl")] == ["start", "warning"]


def test_a_folder_that_cannot_be_created_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    view = RecordingView()
    with Monitor(EventLog(tmp_path / "e.jsonl"), view, sinks=sinks_for(MonitorSection(), tmp_path, {})) as monitor:
        start(monitor)
        monitor.emit("step", **step(1))
    assert [e["type"] for e in view.events] == ["start", "warning", "step"]
    assert "TensorBoard is switched off: it failed (FileExistsError" in view.events[1]["message"]


def test_trackers_import_nothing_heavy(tmp_path: Path) -> None:
    """TensorBoard is imported at the first event, and without TensorFlow and torch."""
    program = f"""
import sys, pathlib
from redline.runs.monitor import sinks_for
from redline.recipe.schema import MonitorSection
(sink,) = sinks_for(MonitorSection(), pathlib.Path({str(tmp_path)!r}), {{}})
assert "tensorboard" not in sys.modules
sink.event({{"type": "start", "time": 1.0, "resumed_from": None}})
sink.event({{"type": "step", "time": 1.0, "step": 1, "loss": 2.0}})
sink.close()
assert not {{"tensorflow", "torch", "wandb"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert read_back(tmp_path / "tensorboard") == {"train/loss": [(1, 2.0)]}


def test_training_writes_its_curves(world: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sinks = sinks_for(MonitorSection(), run, {})
    trainer = None
    from redline.training.control import RunDirectory

    with RunDirectory(run) as directory:
        trainer = world.trainer(directory, "train.steps=3", "eval.samples=1", "eval.sample_tokens=4")
        trainer.monitor._sinks = list(sinks)
        with trainer.monitor:
            start(trainer.monitor)
            trainer.run()
    steps = [e for e in read_events(run / "events.jsonl") if e["type"] == "step"]
    shown = read_back(run / "tensorboard")
    assert shown["train/loss"] == [(e["step"], float(np.float32(e["loss"]))) for e in steps]
    assert shown["train/throughput"] == [(e["step"], float(np.float32(e["tokens_per_s"]))) for e in steps]
    assert [s for s, _ in shown["eval/loss"]] == [0, 3]
    assert set(texts_back(run / "tensorboard")) == {"sample/before", "sample/after"}


# --- Weights & Biases


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.options, self.logged, self.summary, self.finished = options, [], {}, False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


class FakeWandb(types.ModuleType):
    def __init__(self, logged_in: bool = True) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.logged_in = logged_in
        self.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert (prompt, verify) == (False, False), "W&B must not prompt in the middle of a run"
        return self.logged_in

    def init(self, **options: Any) -> FakeRun:
        self.runs.append(FakeRun(**options))
        return self.runs[-1]

    def Settings(self, **options: Any) -> dict[str, Any]:  # noqa: N802 — W&B's name
        return options

    def Html(self, data: str, inject: bool) -> str:  # noqa: N802 — W&B's name
        return data


def wandb_run(
    monkeypatch: pytest.MonkeyPatch, path: Path, fake: FakeWandb, wandb: bool | str, resumed_from: int | None = None
) -> list[str]:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    messages: list[str] = []
    options = MonitorSection(wandb=wandb)
    require_packages(options)
    sinks = sinks_for(options, path, {"train": {"lr": 1e-3}}, messages.append)
    with Monitor(EventLog(path / "events.jsonl"), RecordingView(), sinks=sinks) as monitor:
        start(monitor, resumed_from)
        monitor.emit("step", **step((resumed_from or 0) + 1))
        monitor.emit("eval", step=1, tokens=9, loss=3.3)
        for text in ("c", "d"):
            monitor.emit("sample", step=1, label="after", prompt="a<b", text=text)
        monitor.emit("stop", reason="steps", step=1)
    return messages


def test_wandb_has_the_same_names_and_the_same_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "5ecret")
    fake, path = FakeWandb(), tmp_path / "mine"
    for resumed_from in (None, 1):
        assert wandb_run(monkeypatch, path, fake, "my-project", resumed_from) == []
    first, second = fake.runs
    for run in fake.runs:
        assert run.finished
        assert (run.options["project"], run.options["id"], run.options["resume"]) == (
            "my-project",
            "0123456789ab",
            "allow",
        )
        assert run.options["name"] == "mine"
        assert run.options["config"] == {"train": {"lr": 1e-3}}
        assert run.options["mode"] is None, "W&B decides"
        assert "5ecret" not in str(run.options)
        assert run.summary == {"stop": "steps"}
    number, values = first.logged[0]
    assert number == 1
    assert values == scalars({"type": "step", **step(1)})
    assert values.keys() >= GUIDES
    pages = [(1, {"sample/after": "<pre>a&lt;bc</pre>"}), (1, {"sample/after 2": "<pre>a&lt;bd</pre>"})]
    assert first.logged[1:] == [(1, {"eval/loss": 3.3}), *pages]
    assert second.logged[0][0] == 2
    assert "5ecret" not in (path / "events.jsonl").read_text()
    assert read_back(path / "tensorboard")["train/loss"], "TensorBoard is there too"


def test_without_a_login_the_run_is_recorded_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fake = FakeWandb(logged_in=False)
    (message,) = wandb_run(monkeypatch, tmp_path, fake, True)
    assert "wandb sync" in message
    assert (fake.runs[0].options["mode"], fake.runs[0].options["project"]) == ("offline", "redline")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_run(monkeypatch, tmp_path, fake, True) == []
    assert fake.runs[1].options["mode"] is None, "W&B's own variable has precedence"


def test_a_missing_package_is_reported_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.runs.monitor.find_spec", lambda name: None)
    require_packages(MonitorSection())
    with pytest.raises(RecipeError, match=r"monitor.wandb: needs the package wandb. .*`make setup EXTRAS=wandb`"):
        require_packages(MonitorSection(wandb="mine"))


@pytest.mark.parametrize("value", ["", "  ", 3, None, ["a"]])
def test_invalid_project_names_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is not true, false or the name of a project"):
        MonitorSection(wandb=value)


def test_the_docs_name_every_tag() -> None:
    page = (Path(__file__).parents[2] / "docs/trackers.md").read_text(encoding="utf-8")
    shown = {
        *STEP.values(),
        "eval/loss",
        "eval/perplexity",
        "eval/bits_per_byte",
        "plan",
        "sample/before",
        "sample/after",
    }
    assert {name for name in shown if f"`{name}`" not in page} == set()
