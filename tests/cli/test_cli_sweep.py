"""A sweep: one run after the other, each in its own process, one comparison."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from redline.launch import sweep as sweeping
from redline.launch.sweep import Sweep, parse_axes, run_sweep
from redline.runs.events import read_events
from redline.vocabulary import RECIPE_LOCK_FILE


def comparison(directory: Path) -> Any:
    return json.loads((directory / "comparison.json").read_text())


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace members by ones that write a run at once (`train.seed=13` fails); return the started ones in order."""
    started: list[list[str]] = []
    script = (
        "import json, os, sys\n"
        "path, code, loss = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])\n"
        "os.makedirs(path, exist_ok=True)\n"
        "if code: sys.exit(code)\n"
        "open(path + '/lock.json', 'w').write('{}')\n"
        "events = [{'type': 'start'}, {'type': 'step', 'step': 2, 'loss': loss + 1, 'tokens_per_s': 1000},\n"
        "          {'type': 'eval', 'step': 2, 'loss': loss}, {'type': 'eval', 'step': 3, 'loss': loss + 0.5},\n"
        "          {'type': 'stop', 'step': 3, 'reason': 'steps', 'hours': 0.5}]\n"
        "open(path + '/events.jsonl', 'w').write(''.join(json.dumps(e) + '\\n' for e in events))\n"
    )

    def command(sweep: Sweep, member: Any, path: Path) -> list[str]:
        started.append(member.overrides)
        code = 3 if member.values.get("train.seed") == "13" else 0
        return [sys.executable, "-S", "-c", script, str(path), str(code), member.values["train.lr"]]

    monkeypatch.setattr(sweeping, "_command", command)
    return started


def test_tokenizers_are_compared_by_bits_per_byte(recipe: str, inside: Any, tmp_path: Path) -> None:
    """Bytes have the lower loss, for there is less to predict in each."""
    words = (f"data.source={json.decoder.__file__}", "model.vocab=auto", "train.steps=8")
    answer = inside("train", recipe, *words, "--sweep", "data.tokenizer=bytes,train:600", "--run", "out")
    assert answer.code == 0, answer.err
    result = comparison(tmp_path / "out")
    by_bytes, by_pieces = result["members"]
    assert by_bytes["best_val"] < by_pieces["best_val"]
    assert result["best"] == by_pieces["name"]
    assert any("bits per byte" in note for note in result["notes"])
    assert set(result["notes"]) <= set(answer.out.splitlines())


def test_every_combination_and_the_best(acted: list[list[str]], recipe: str, inside: Any, tmp_path: Path) -> None:
    answer = inside("train", recipe, "--sweep", "train.lr=0.3,0.1,0.2", "--sweep", "train.seed=1,2", "--run", "out")
    assert answer.code == 0, answer.err
    assert acted == [[f"train.lr={lr}", f"train.seed={seed}"] for lr in ("0.3", "0.1", "0.2") for seed in (1, 2)]
    result = comparison(tmp_path / "out")
    assert result["best"] == "3-lr=0.1_seed=1"
    assert result["notes"] == []
    row = result["members"][2]
    assert row == {
        "name": "3-lr=0.1_seed=1",
        "values": {"train.lr": "0.1", "train.seed": "1"},
        "status": "finished",
        "exit_code": 0,
        "step": 3,
        "loss": 1.1,
        "best_val": 0.1,
        "tokens_per_s": 1000,
        "hours": 0.5,
    }
    marked = [line for line in answer.out.splitlines() if "← best" in line]
    assert len(marked) == 1
    assert marked[0].split()[:2] == ["0.1", "1"]


def test_a_failed_member_does_not_stop_the_sweep(
    acted: list[list[str]], recipe: str, inside: Any, tmp_path: Path
) -> None:
    words = ("train", recipe, "--sweep", "train.lr=0.1", "--sweep", "train.seed=13,1", "--run", "out")
    answer = inside(*words)
    assert answer.code == 1
    assert [row["status"] for row in comparison(tmp_path / "out")["members"]] == ["failed", "finished"]
    assert "failed (3)" in answer.out
    assert "← best" in answer.out
    again = inside(*words)
    assert again.code == 1
    assert acted[2:] == [["train.lr=0.1", "train.seed=13"]], "what finished is not done again"
    assert "2/2  train.lr=0.1 train.seed=1  finished already" in again.err


def test_another_sweep_is_not_mixed_in(acted: list[list[str]], recipe: str, inside: Any, tmp_path: Path) -> None:
    assert inside("train", recipe, "--sweep", "train.lr=0.1", "--run", "out").code == 0
    before = sorted(tmp_path.rglob("*"))
    for words in (("--sweep", "train.lr=0.2"), ("train.steps=9", "--sweep", "train.lr=0.1")):
        answer = inside("train", recipe, *words, "--run", "out")
        assert answer.code == 2
        assert "out: this directory holds another sweep" in answer.message
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    answer = inside("train", recipe, "--sweep", "train.lr=0.1", "--run", "taken")
    assert answer.code == 2
    assert "taken: the folder is not empty. Choose another --run." in answer.message
    assert len(acted) == 1
    assert [path for path in sorted(tmp_path.rglob("*")) if "taken" not in str(path)] == before


def test_members_are_runs_like_others(acted: list[list[str]], recipe: str, inside: Any, tmp_path: Path) -> None:
    """Without --run the sweep is in runs/, where each member is listed and found by name."""
    assert inside("train", recipe, "--sweep", "train.lr=0.1,0.2").code == 0
    (folder,) = (tmp_path / "runs").glob("toy-*-sweep")
    names = {row["name"] for row in json.loads(inside("runs", "--json").out)}
    assert names == {f"{folder.name}/1-lr=0.1", f"{folder.name}/2-lr=0.2"}
    from redline.runs.summary import resolve_run

    assert resolve_run(f"{folder.name}/2-lr=0.2@best", tmp_path / "runs") == (folder / "2-lr=0.2", "best")


def test_a_dry_run_starts_nothing(acted: list[list[str]], recipe: str, inside: Any, tmp_path: Path) -> None:
    answer = inside("train", recipe, "--sweep", "train.lr=0.1,0.2", "--run", "out", "--dry-run")
    assert answer.out.splitlines() == ["out/1-lr=0.1  train.lr=0.1", "out/2-lr=0.2  train.lr=0.2"]
    assert acted == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "train.lr"), "--sweep: 'train.lr' is not KEY=VALUE,VALUE,…."),
        (("--sweep", "train.lr=1,,2"), "is not KEY=VALUE,VALUE"),
        (("--sweep", "train.lr=1,1"), "has a value twice"),
        (("--sweep", "train.lr=1", "--sweep", "train.lr=2"), "train.lr is given twice. Put all its values"),
        (("train.lr=3", "--sweep", "train.lr=1,2"), "train.lr is given twice"),
        (("--sweep", "train.lr=1e-4,much"), "train.lr: 'much' is not a number (or auto)."),
        (("--sweep", "train.lrr=1,2"), "Did you mean 'train.lr'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_found_before_anything_is_started(
    acted: list[list[str]], recipe: str, inside: Any, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    answer = inside("train", recipe, *words)
    assert answer.code == 2
    assert says in answer.message
    assert acted == []
    assert list(tmp_path.iterdir()) == []


def test_a_resume_is_of_one_run(inside: Any) -> None:
    answer = inside("train", "--resume", "latest", "--sweep", "train.lr=1,2")
    assert answer.code == 2
    assert "--resume resumes one run." in answer.message


def test_commas_within_brackets_belong_to_the_value() -> None:
    assert parse_axes(["train.betas=[0.9, 0.95],[0.9, 0.99]"], []) == {"train.betas": ["[0.9, 0.95]", "[0.9, 0.99]"]}
    nested = "data.source=[{source: ./a, weight: 3}, {source: ./b}],./c"
    assert parse_axes([nested], []) == {"data.source": ["[{source: ./a, weight: 3}, {source: ./b}]", "./c"]}
    names = [member.name for member in Sweep("x", [], {"a.seed": ["1"], "b.seed": ["../2"]}).members]
    assert names == ["1-a.seed=1_b.seed=..-2"]


def test_commas_within_quotes_do_too_and_an_apostrophe_is_no_quote() -> None:
    values = {"'a, b','c'": ["'a, b'", "'c'"], '"it\'s, so",x': ['"it\'s, so"', "x"], "don't,won't": ["don't", "won't"]}
    for text, expected in values.items():
        assert parse_axes([f"eval.prompt={text}"], []) == {"eval.prompt": expected}


def test_an_interrupted_member_is_resumed(tmp_path: Path) -> None:
    sweep = Sweep("toy", ["train.steps=3"], {"train.lr": ["0.1"]})
    (member,) = sweep.members
    path = tmp_path / member.name
    fresh = ["train", "toy", "train.steps=3", "train.lr=0.1", "--run", str(path)]
    assert sweeping._command(sweep, member, path)[3:] == fresh
    path.mkdir()
    (path / RECIPE_LOCK_FILE).write_text("{}")
    assert sweeping._command(sweep, member, path)[3:] == ["train", "--resume", str(path)]


def test_for_real(recipe: str, inside: Any, tmp_path: Path) -> None:
    """One member trains; the other cannot be built here."""
    answer = inside("train", recipe, "train.steps=3", "--sweep", "model.attention=cudnn,dense", "--run", "out")
    assert answer.code == 1, answer.err
    failed, trained = comparison(tmp_path / "out")["members"]
    assert (trained["status"], trained["step"], failed["status"], failed["exit_code"]) == ("finished", 3, "failed", 1)
    assert trained["tokens_per_s"] > 0
    assert trained["best_val"] == min(
        e["loss"] for e in read_events(tmp_path / "out" / trained["name"] / "events.jsonl") if e["type"] == "eval"
    )


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `redline …` in a session of its own, so that a signal can be sent to all its processes, as by Ctrl-C."""
    started = []
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "redline", *words]
        options: Any = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **options))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_ctrl_c_saves_the_member_and_ends_the_sweep(terminal: Any, recipe: str, tmp_path: Path) -> None:
    process = terminal("train", recipe, "train.hours=1h", "--sweep", "train.steps=1000000,3", "--run", "out")
    first = tmp_path / "out/1-steps=1000000"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(e["type"] == "step" for e in read_events(first / "events.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "--run out" in error
    stop = read_events(first / "events.jsonl")[-1]
    assert (stop["type"], stop["reason"]) == ("stop", "interrupted")
    assert (first / "checkpoints" / f"step-{stop['step']:08d}").is_dir()
    assert [row["status"] for row in comparison(tmp_path / "out")["members"]] == ["stopped", "waiting"]
    assert not (tmp_path / "out/2-steps=3" / RECIPE_LOCK_FILE).exists()


def test_a_member_receives_ctrl_c_once(tmp_path: Path) -> None:
    """The terminal sends it to every process of the group; received twice, it would mean "exit at once"."""
    member = (
        "import signal, sys, time, pathlib\n"
        "heard, out = [], pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
        "out.write_text('ready')\n"
        "while not heard: time.sleep(0.01)\n"
        "end = time.monotonic() + 0.5\n"
        "while time.monotonic() < end: time.sleep(0.01)\n"
        "out.write_text(str(len(heard)))\n"
    )
    sweep = (
        "import sys\nfrom redline.launch.sweep import _command_runner\n"
        "with _command_runner() as run: sys.exit(run([sys.executable, '-S', '-c', *sys.argv[1:]]))\n"
    )
    note = tmp_path / "note"
    process = subprocess.Popen([sys.executable, "-c", sweep, member, str(note)], start_new_session=True)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (note.is_file() and note.read_text()):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == EXIT_INTERRUPTED
    assert note.read_text() == "1"


def test_a_sweep_in_an_unwritable_folder(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written") as refused:
        run_sweep(Sweep(recipe, [], {"train.lr": ["0.1"]}), tmp_path / "file/out")
    assert refused.value.exit_code == EXIT_FAILED, "as of a single run there"


def test_the_folder_of_a_sweep_is_refused_as_a_run(recipe: str, inside: Any, tmp_path: Path) -> None:
    (tmp_path / "runs/sw").mkdir(parents=True)
    (tmp_path / "runs/sw/sweep.json").write_text("{}")
    refused = inside("train", recipe, "--run", "runs/sw")
    assert refused.code == 2
    assert "runs/sw: this directory holds a sweep. Choose another --run." in refused.err
    assert [path.name for path in (tmp_path / "runs/sw").iterdir()] == ["sweep.json"]
