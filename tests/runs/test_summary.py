import fcntl
import json
import os
import shutil

import pytest

from redline.errors import UserError
from redline.runs.events import EventLog, History
from redline.runs.summary import (
    find_runs,
    is_locked,
    resolve_run,
    run_status,
    summarise,
)


def make_run(path, *events, age=0):
    path.mkdir(parents=True)
    (path / "lock.json").write_text("{}")
    log = EventLog(path / "events.jsonl")
    for kind, fields in events:
        log.emit(kind, **fields)
    log.close()
    os.utime(path / "lock.json", (1e9 - age, 1e9 - age))
    return path


START = ("start", {"resumed_from": None})
STEP = ("step", {"step": 10, "loss": 3.5, "tokens": 1000, "hours": 0.1, "cost_usd": 0.5})


def test_a_summary_holds_the_newest_figures(tmp_path):
    run = make_run(
        tmp_path / "a",
        START,
        STEP,
        ("eval", {"step": 10, "loss": 3.4}),
        ("step", {"step": 20, "loss": None, "tokens": 2000, "hours": 0.2, "cost_usd": None}),
        ("stop", {"reason": "steps", "step": 21, "tokens": 2100, "hours": 0.3, "cost_usd": 0.7}),
    )
    summary = summarise(run)
    assert (summary.name, summary.status, summary.step, summary.tokens) == ("a", "finished", 21, 2100)
    assert (summary.loss, summary.val_loss, summary.hours, summary.cost_usd) == (3.5, 3.4, 0.3, 0.7)
    assert json.loads(json.dumps(summary.as_dict()))["path"] == str(run)


def test_the_status_comes_from_the_stop_event(tmp_path):
    stop = ("stop", {"reason": "preempted (SIGTERM)"})
    assert summarise(make_run(tmp_path / "a", START, stop)).status == "preempted"


def test_a_run_without_a_stop_event_has_crashed(tmp_path):
    assert summarise(make_run(tmp_path / "a", START, STEP)).status == "crashed"


def test_the_stop_event_of_an_earlier_attempt_does_not_count(tmp_path):
    run = make_run(tmp_path / "a", START, ("stop", {"reason": "preempted"}), ("start", {"resumed_from": 10}))
    assert summarise(run).status == "crashed"


def test_a_run_is_running_while_a_live_process_holds_its_lock(tmp_path):
    run = make_run(tmp_path / "a", START, ("stop", {"reason": "steps"}), ("start", {"resumed_from": 10}))
    (run / ".lock").touch()
    assert summarise(run).status == "crashed"
    ready, told = os.pipe()
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        descriptor = os.open(run / ".lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(told, b"x")
        os.read(hold, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        assert summarise(run).status == "running"
    finally:
        os.close(release)
        os.waitpid(child, 0)
        for descriptor in (ready, told, hold):
            os.close(descriptor)
    assert summarise(run).status == "crashed"


def test_two_checks_at_once_do_not_take_each_other_for_the_run(tmp_path):
    (tmp_path / ".lock").touch()
    with open(tmp_path / ".lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not is_locked(tmp_path)


def test_summarising_creates_no_files(tmp_path):
    run = make_run(tmp_path / "a")
    before = sorted(run.iterdir())
    summarise(run)
    assert sorted(run.iterdir()) == before


def test_disk_counts_a_linked_file_once_and_follows_no_link(tmp_path):
    run = make_run(tmp_path / "a")
    empty = summarise(run).disk_bytes
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "one").write_bytes(b"x" * 5000)
    os.link(run / "checkpoints" / "one", run / "checkpoints" / "two")
    (tmp_path / "elsewhere").write_bytes(b"x" * 90_000)
    (run / "link").symlink_to(tmp_path / "elsewhere")
    assert 5000 <= summarise(run).disk_bytes - empty < 6000


def test_find_runs_is_newest_first_and_skips_other_entries(tmp_path):
    make_run(tmp_path / "old", age=10)
    make_run(tmp_path / "new")
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "latest").symlink_to("new")
    assert [run.name for run in find_runs(tmp_path)] == ["new", "old"]
    assert find_runs(tmp_path / "nowhere") == []


@pytest.fixture
def root(tmp_path):
    make_run(tmp_path / "runs" / "quickstart-1", age=10)
    make_run(tmp_path / "runs" / "quickstart-2")
    return tmp_path / "runs"


@pytest.mark.parametrize(("tail", "selector"), [("", None), ("@best", "best"), ("@300", 300), ("@0", 0)])
def test_a_run_is_found_by_name_path_or_latest(root, tail, selector):
    assert resolve_run(f"quickstart-1{tail}", root) == (root / "quickstart-1", selector)
    assert resolve_run(f"{root}/quickstart-1{tail}", root / "elsewhere") == (root / "quickstart-1", selector)
    assert resolve_run(f"latest{tail}", root) == (root / "quickstart-2", selector)


def test_latest_follows_the_link_unless_it_dangles(root):
    (root / "latest").symlink_to("quickstart-1")
    assert resolve_run("latest", root) == (root / "quickstart-1", None)
    (root / "latest").unlink()
    (root / "latest").symlink_to("removed")
    assert resolve_run("latest", root) == (root / "quickstart-2", None)


def test_latest_may_point_outside_the_root(root, tmp_path):
    elsewhere = make_run(tmp_path / "disk" / "big")
    (root / "latest").symlink_to(elsewhere)
    assert resolve_run("latest", root) == (elsewhere.resolve(), None)


def test_an_at_sign_in_a_directory_is_part_of_its_name(root):
    run = make_run(root / "lr@3e-4")
    assert resolve_run("lr@3e-4", root) == (run, None)
    assert resolve_run("lr@3e-4@best", root) == (run, "best")


def test_a_directory_without_a_run_does_not_hide_the_run_of_that_name(root, tmp_path, monkeypatch):
    (tmp_path / "quickstart-1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_run("quickstart-1", root)[0] == root / "quickstart-1"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("quickstrat-1", "Did you mean 'quickstart-1'?"),
        ("quickstrat-1@best", "Did you mean 'quickstart-1'?"),
        ("zzz", "redline runs"),
        ("", "RUN: no run is named. Write its path, its name or `latest`; `redline runs`"),
        ("@best", "@best: no run is named before @best. Write, for example, latest@best."),
        ("quickstart-1@worst", "@best"),
        ("quickstart-1@-5", "@best"),
        ("quickstart-1@٣", "@best"),
    ],
)
def test_an_unknown_run_gets_advice(root, name, advice):
    with pytest.raises(UserError, match=r"run|checkpoint") as error:
        resolve_run(name, root)
    assert advice in str(error.value)


def test_a_sweep_is_not_a_run(root):
    (root / "lr").mkdir()
    (root / "lr" / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match=r"lr: this is a sweep, not a run. Name one of its runs: .*lr/RUN, once"):
        resolve_run("lr", root)
    shutil.copytree(root / "quickstart-1", root / "lr" / "1-lr=3e-4")
    for name in ("lr", "lr@best", str(root / "lr")):
        with pytest.raises(UserError, match=r"this is a sweep, not a run. Name one of its runs: .*/lr/1-lr=3e-4\."):
            resolve_run(name, root)


@pytest.mark.parametrize("name", ["latest", "a"])
def test_without_any_run_the_advice_is_to_train(tmp_path, name):
    with pytest.raises(UserError, match="redline train"):
        resolve_run(name, tmp_path)


def test_a_run_that_could_not_save_its_last_state_has_failed(tmp_path):
    stop = {"type": "stop", "reason": "steps"}
    assert run_status(tmp_path, History([{"type": "start"}, stop])) == "finished"
    assert run_status(tmp_path, History([{"type": "start"}, {**stop, "saved": False}])) == "failed"
