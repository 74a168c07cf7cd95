import errno
import json
from itertools import pairwise
from pathlib import Path

import pytest

from redline.runs.events import EventLog, History, NullEventLog, finite, read_events, read_last_events


def lines(path):
    return path.read_bytes().split(b"\n")


def test_an_event_is_one_line_with_its_type_and_time_first(tmp_path):
    log = EventLog(tmp_path / "run" / "events.jsonl", clock=lambda: 12.5)
    returned = log.emit("step", step=1, loss=2.0, where=tmp_path / "a", shape=(2, 3))
    log.close()
    (line, rest) = lines(log.path)
    assert list(json.loads(line)) == ["type", "time", "step", "loss", "where", "shape"]
    assert json.loads(line) == returned
    assert returned == {
        "type": "step",
        "time": 12.5,
        "step": 1,
        "loss": 2.0,
        "where": str(tmp_path / "a"),
        "shape": [2, 3],
    }
    assert rest == b""


def test_every_event_is_on_disk_before_the_log_is_closed(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("start")
    assert [e["type"] for e in read_events(log.path)] == ["start"]


def test_a_start_event_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the start event holds what a resume changed; a step may be lost, and must not wait for the disk."""
    synced, path = [], tmp_path / "events.jsonl"
    monkeypatch.setattr("os.fsync", lambda number: synced.append(path.read_text().count("start")))
    log = EventLog(path)
    log.emit("step", step=1)
    assert synced == []
    log.emit("start", overrides=["train.steps=4"])
    assert synced == [1]


def test_non_finite_numbers_become_null_at_any_depth(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    event = log.emit("step", loss=float("nan"), terms={"a": [float("inf"), 1.0], "b": float("-inf")})
    assert (event["loss"], event["terms"]) == (None, {"a": [None, 1.0], "b": None})
    assert json.loads(log.path.read_text(), parse_constant=pytest.fail) == event


def test_a_value_that_json_lacks_is_refused_and_leaves_no_partial_line(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(TypeError):
        log.emit("step", loss=object())
    assert log.path.read_bytes() == b""


@pytest.mark.parametrize(
    "text", ["line\nbreak\r\n", "\u2028 separator", "lone \ud800 surrogate", "emoji 🚄", "\x00\x1b["]
)
def test_any_text_survives_the_round_trip_on_one_line(tmp_path, text):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("sample", text=text)
    assert len(lines(log.path)) == 2
    assert read_events(log.path)[0]["text"] == text


def test_a_torn_last_line_does_not_damage_the_next_event(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type":"step","time":1,"step":1}\n{"type":"step","ti')
    log = EventLog(path)
    assert path.read_bytes().endswith(b'"ti\n')
    log.emit("step", step=2)
    events = read_events(path)
    assert [e["step"] for e in events] == [1, 2]
    assert events.unreadable == 1


def test_opening_an_intact_log_changes_nothing(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type":"start","time":1}\n')
    EventLog(path).close()
    assert path.read_bytes() == b'{"type":"start","time":1}\n'


def test_bad_lines_are_skipped_and_counted(tmp_path):
    path = tmp_path / "events.jsonl"
    bad = [b"\xff\xfe", b"[1,2]", b'{"no":"type"}', b'{"type":5}', b"[" * 100_000, b'"x"']
    path.write_bytes(b"\n".join([b'{"type":"start"}', *bad, b"", b'{"type":"step","loss":NaN}', b""]))
    events = read_events(path)
    assert events == [{"type": "start"}, {"type": "step", "loss": None}]
    assert events.unreadable == len(bad)


def test_a_log_that_does_not_exist_yet_is_empty(tmp_path):
    assert read_events(tmp_path / "events.jsonl") == []


def test_resuming_drops_what_will_be_repeated_and_nothing_else(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("start", resumed_from=None)
    for step in (100, 200, 300):
        for kind in ("step", "eval", "checkpoint", "sample", "warning"):
            log.emit(kind, step=step)
    log.emit("stop", step=300)
    log.emit("start", resumed_from=200)
    log.emit("step", step=300)
    kept = [(e["type"], e.get("step")) for e in read_events(log.path)]
    for kind in ("eval", "checkpoint", "sample"):
        assert [step for k, step in kept if k == kind] == [100, 200]
    assert [step for k, step in kept if k == "step"] == [100, 200, 300]
    assert [step for k, step in kept if k == "warning"] == [100, 200, 300]
    assert [k for k, _ in kept].count("stop") == 1
    assert kept[-1] == ("step", 300)


def test_resuming_from_step_zero_drops_every_step(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("step", step=1)
    log.emit("start", resumed_from=0)
    assert [e["type"] for e in read_events(log.path)] == ["start"]


class FullDisk:
    """A file that takes `room` more bytes and then raises ENOSPC."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        taken = bytes(data)[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(taken)
        return self.file.write(taken)

    def close(self):
        self.file.close()


@pytest.mark.parametrize("room", [0, 1, 20])
def test_a_full_disk_is_reported_once_and_writing_continues_when_there_is_space_again(tmp_path, room):
    reports = []
    log = EventLog(tmp_path / "events.jsonl", on_error=reports.append)
    log.emit("step", step=1)
    log._file = FullDisk(log._file, room)
    assert log.emit("step", step=2)["step"] == 2
    log.emit("step", step=3)
    assert len(reports) == 1
    assert "No space left" in reports[0]
    assert str(log.path) in reports[0]
    log._file.room = 10_000
    log.emit("step", step=4)
    assert [e["step"] for e in read_events(log.path)] == [1, 4]


def test_a_really_full_device_does_not_stop_the_run():
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("no /dev/full here")
    reports = []
    log = EventLog(device, on_error=reports.append)
    log.emit("step", step=1)
    log.emit("step", step=2)
    assert len(reports) == 1


@pytest.mark.parametrize("value", [True, None, "1", float("nan"), float("inf"), 10**400, [1]])
def test_only_finite_numbers_are_numbers(value):
    assert finite(value) is None
    assert finite(3) == 3


def test_of_a_very_long_log_the_lowest_and_highest_losses_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.runs.events.MAX_EVENTS", 100)
    spikes, skipped = {333: 99.0, 777: 0.5}, 501
    with open(tmp_path / "events.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, 1001):
            event = {"type": "step", "step": step, "loss": spikes.get(step, 3.0 + (step % 7) / 10)}
            file.write(json.dumps(event | ({"skipped": 2} if step == skipped else {})) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"type": "eval", "step": step, "loss": 3.0}) + "\n")
    found = read_events(tmp_path / "events.jsonl")
    steps = [event["step"] for event in found if event["type"] == "step"]
    assert len(steps) <= 100 + 3 * 12, "other events end a stretch early"
    assert all(following - step <= 33 for step, following in pairwise([0, *steps])), "as dense early as late"
    assert found.left_out == 1000 - len(steps)
    assert steps == sorted(steps)
    assert {*spikes, skipped, 1000} <= {*steps}
    assert [event["step"] for event in found if event["type"] == "eval"] == list(range(100, 1001, 100))


def test_a_null_log_returns_events_and_writes_none(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Ranks other than rank 0 use it. A log on /dev/null could not be synced, which looked like a full disk."""
    log = NullEventLog(clock=lambda: 12.5)
    event = log.emit("start", loss=float("nan"), where=tmp_path)
    log.close()
    assert event == {"type": "start", "time": 12.5, "loss": None, "where": str(tmp_path)}
    assert not recwarn.list


def test_what_is_repeated_at_the_step_of_a_resume_replaces_the_earlier_events() -> None:
    history = History(
        [
            {"type": "start"},
            {"type": "eval", "step": 20, "loss": 3.0},
            {"type": "eval", "step": 40, "loss": 2.5},
            {"type": "sample", "step": 40, "label": "mid", "text": "old"},
            {"type": "sample", "step": 40, "label": "after", "text": "kept"},
            {"type": "start", "resumed_from": 40},
            {"type": "sample", "step": 40, "label": "mid", "text": "new"},
            {"type": "sample", "step": 40, "label": "mid", "text": "second"},
            {"type": "eval", "step": 40, "loss": 2.4},
        ]
    )
    assert [event["loss"] for event in history.of_type("eval")] == [3.0, 2.4]
    assert [event["text"] for event in history.of_type("sample")] == ["kept", "new", "second"]
    assert History(history) == history, "a history that was folded stays as it is"


def test_a_history_states_the_newest_plan_and_the_stop_of_the_newest_attempt() -> None:
    history = History([{"type": "start"}, {"type": "plan", "n": 1}, {"type": "stop", "reason": "steps"}])
    assert history.plan["n"] == 1
    assert history.stop is not None
    history.add({"type": "start", "resumed_from": 0})
    history.add({"type": "plan", "n": 2})
    assert history.plan["n"] == 2
    assert history.stop is None
    assert (History().plan, History().stop, History().first_start) == ({}, None, {})


def test_a_history_up_to_a_step_keeps_events_without_a_step() -> None:
    steps = [{"type": "step", "step": n, "loss": 9.0 - n} for n in range(1, 6)]
    history = History([{"type": "plan"}, *steps]).until(3)
    assert history.last_number("loss", "step") == 6.0
    assert history.plan == {"type": "plan"}


def test_overrides_of_resumes_include_the_stop_conditions_in_force() -> None:
    stops = {"steps": 90, "tokens": None, "epochs": None}
    history = History(
        [
            {"type": "start", "overrides": ["train.lr=1"]},
            {"type": "start", "resumed_from": 0, "overrides": ["train.steps=90"], "stops": stops},
            {"type": "start", "resumed_from": 5, "overrides": "odd"},
        ]
    )
    counted = ["train.steps=90", "train.tokens=null", "train.epochs=null"]
    assert history.resume_overrides() == [["train.steps=90"], counted]
    unchanged = History([{"type": "start", "resumed_from": 5, "stops": stops}])
    assert unchanged.resume_overrides() == []


def test_the_last_events_of_a_long_log_are_read_from_its_end(tmp_path: Path) -> None:
    lines = [json.dumps({"type": "step", "step": n, "text": "x" * 1000}) for n in range(500)]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, '{"type": "stop", "reason": "steps"}', ""]))
    last = read_last_events(tmp_path / "events.jsonl")
    assert 0 < len(last) < 100
    assert last.stop is not None
    assert read_last_events(tmp_path / "missing") == []
