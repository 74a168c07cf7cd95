"""Readings of a card: what it tells is passed on, what it refuses is None, and no answer ever hurts a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from redline.hardware.nvml import Nvml, Reading, ThrottleWatch, first_gpu, open_nvml, throttle_names, visible_handles

FIELDS = ("gpu_util", "gpu_memory_gib", "power_w", "sm_clock_mhz", "temperature_c", "throttle", "energy_j")


def test_readings_without_a_gpu_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert Nvml().read() == Reading()
    assert Reading().fields() == dict.fromkeys(FIELDS)
    assert first_gpu() is None


def test_a_reading(plug_in: Any, card: Any) -> None:
    plug_in(card(throttle=0x04 | 0x20))
    reading = Nvml().read()
    assert reading == Reading(97, 2.0, 412.5, 700.0, 1500, 1980, 3201, 61, "power_cap+thermal", 90_000.5)
    assert tuple(reading.fields()) == FIELDS
    assert json.loads(json.dumps(reading.fields()))["throttle"] == "power_cap+thermal"


@pytest.mark.parametrize(
    "refused", ["util", "milliwatts", "clock", "temperature", "throttle", "limit", "max_clock", "millijoules"]
)
def test_a_refused_reading_leaves_the_others(plug_in: Any, card: Any, refused: str) -> None:
    plug_in(card(**{refused: None}))
    values = list(vars(Nvml().read()).values())
    assert values.count(None) == 1


def test_a_card_that_falls_off_the_bus_while_it_is_read(plug_in: Any, card: Any, monkeypatch: Any) -> None:
    fake = plug_in(card())
    nvml = Nvml()
    for name in [name for name in dir(fake) if name.startswith("nvmlDeviceGet")]:
        monkeypatch.setattr(fake, name, lambda *_: (_ for _ in ()).throw(RuntimeError("GPU is lost")))
    assert nvml.read().fields() == dict.fromkeys(FIELDS)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "0123"),
        ("", ""),
        ("-1", ""),
        ("3", "3"),
        ("2,1", "21"),
        ("1,9,2", "1"),  # CUDA stops at the first that means nothing
        ("GPU-3333-ffff", "3"),
        ("GPU-22", "2"),
        ("GPU-22,0", "20"),
        ("GPU-77", ""),
        ("NoDevFiles", ""),
    ],
)
def test_what_cuda_shows(plug_in: Any, card: Any, visible: str | None, expected: str) -> None:
    cards = [card(uuid=f"GPU-{n}{n}{n}{n}-ffff", name=str(n)) for n in range(4)]
    plug_in(*cards, visible=visible)
    assert "".join(handle.name for handle in visible_handles(open_nvml())) == expected
    first = first_gpu()
    assert (first.name if first else "") == expected[:1]
    assert (Nvml().read() == Reading()) == (not expected)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "slice a"), ("0", "slice a"), ("MIG-b", "slice b"), ("1", "whole"), ("MIG-c", None)],
)
def test_slices_of_a_card(plug_in: Any, card: Any, visible: str | None, expected: str | None) -> None:
    """Memory is the slice's own; power and clocks are the card's; what only a whole card knows is None."""
    refusing = {"capability": None, "milliwatts": None, "clock": None, "util": None, "throttle": None}
    slices = [
        card(name=f"slice {n}", uuid=f"MIG-{n}{n}{n}{n}", total=10 << 30, reserved=0, used=3 << 30, **refusing)
        for n in "ab"
    ]
    plug_in(card(mig=True, slices=slices), card(name="whole", mig=False), visible=visible)
    first = first_gpu()
    assert (first.name if first else None) == expected
    if first is not None and expected != "whole":
        assert first.capability == (9, 0)
        assert first.memory_bytes == 10 << 30
        reading = Nvml().read()
        assert reading.gpu_memory_gib == 3.0
        assert reading.power_w == 412.5
        assert reading.gpu_util is None


def test_the_memory_is_what_cuda_can_give(plug_in: Any, card: Any, monkeypatch: Any) -> None:
    fake = plug_in(card(total=143 << 30, reserved=1 << 30))
    assert first_gpu().memory_bytes == 142 << 30  # type: ignore[union-attr]
    plain = fake.nvmlDeviceGetMemoryInfo
    monkeypatch.setattr(fake, "nvmlDeviceGetMemoryInfo", lambda handle: plain(handle))  # an old library
    assert first_gpu().memory_bytes == 143 << 30  # type: ignore[union-attr]


def test_every_known_reason_has_a_word() -> None:
    import pynvml

    names = [name for name in dir(pynvml) if name.startswith("nvmlClocksEventReason") and not name.endswith("All")]
    for bits in (getattr(pynvml, name) for name in names):
        assert bool(throttle_names(bits)) == bool(bits)
    assert throttle_names(pynvml.nvmlClocksEventReasonSwPowerCap) == "power_cap"
    assert throttle_names(pynvml.nvmlClocksEventReasonSwThermalSlowdown) == "thermal"
    assert throttle_names(pynvml.nvmlClocksEventReasonHwSlowdown) == "hw_slowdown"
    assert throttle_names(pynvml.nvmlClocksEventReasonSyncBoost) == "sync_boost"
    assert throttle_names(pynvml.nvmlClocksEventReasonGpuIdle) == "idle"


def warnings_of(watch: ThrottleWatch, throttle: str | None, lines: int) -> list[str]:
    reading = Reading(power_limit_w=700, sm_clock_mhz=1485, sm_clock_max_mhz=1980, temperature_c=91, throttle=throttle)
    return [warning.text for _ in range(lines) if (warning := watch.note(reading))]


def test_heat_is_said_once_with_what_it_costs() -> None:
    watch = ThrottleWatch()
    (warning,) = warnings_of(watch, "thermal+power_cap", 15)
    assert "91 °C" in warning
    assert "1485 of 1980 MHz (75 %)" in warning
    assert warnings_of(watch, "", 1) == []
    assert warnings_of(watch, "hw_slowdown", 50) == []


def test_a_power_cap_is_said_once_when_it_lasts() -> None:
    watch = ThrottleWatch()
    for _ in range(5):  # at the limit now and then is how a busy card works
        assert warnings_of(watch, "power_cap", 15) == []
        assert warnings_of(watch, "", 1) == []
    (warning,) = warnings_of(watch, "power_cap", 200)
    assert "700 W" in warning
    assert "1485 of 1980 MHz" in warning


@pytest.mark.parametrize("throttle", [None, "", "idle", "clock_setting", "sync_boost"])
def test_what_costs_nothing_is_not_said(throttle: str | None) -> None:
    assert warnings_of(ThrottleWatch(), throttle, 100) == []


def test_a_card_that_tells_no_clock_can_be_hot_too() -> None:
    watch = ThrottleWatch()
    warnings = [watch.note(Reading(throttle="thermal")) for _ in range(5)]
    (warning,) = [warning.text for warning in warnings if warning]
    assert "too hot" in warning
    assert "MHz" not in warning


def test_a_step_event_carries_what_the_card_said(world: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """A CPU run writes null; with a card that is too hot the run is warned once."""
    from redline.runs.events import read_events

    world.run(tmp_path / "cpu", "train.steps=2")
    steps = [event for event in read_events(tmp_path / "cpu/events.jsonl") if event["type"] == "step"]
    assert all({name: step[name] for name in FIELDS} == dict.fromkeys(FIELDS) for step in steps)

    hot = Reading(gpu_util=99.0, sm_clock_mhz=900.0, sm_clock_max_mhz=1980.0, temperature_c=92.0, throttle="thermal")
    monkeypatch.setattr("redline.training.readings.Reading", lambda: hot)
    world.run(tmp_path / "hot", "train.steps=6")
    events = read_events(tmp_path / "hot/events.jsonl")
    assert [event["throttle"] for event in events if event["type"] == "step"] == ["thermal"] * 6
    warnings = [event["message"] for event in events if event["type"] == "warning"]
    assert len([message for message in warnings if "too hot" in message]) == 1


def test_each_rank_reads_its_own_card(plug_in: Any, card: Any) -> None:
    """With eight cards, and with a scheduler that shows each process only its own."""
    cards = [card(uuid=f"GPU-{n}", temperature=50 + n) for n in range(8)]
    plug_in(*cards)
    assert [Nvml(rank).read().temperature_c for rank in range(8)] == [*range(50, 58)]
    plug_in(*cards, visible="5")
    assert Nvml(5).read().temperature_c == 55


def test_readings_travel_as_numbers(plug_in: Any, card: Any) -> None:
    for answers in ({}, {"throttle": 0x04 | 0x40}, {"milliwatts": None, "throttle": None}):
        plug_in(card(**answers))
        reading = Nvml().read()
        sent = [float("nan") if value is None else value for value in reading.numbers()]
        assert Reading.from_numbers(sent) == reading
