"""FIFOs, sockets and devices in a foreign folder: every command ends, and none waits for them."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.cache import IrregularFileError, open_regular, read_bytes
from redline.data.tokens import open_tokens
from redline.errors import UserError
from redline.runs.events import EventLog, read_events
from redline.runs.live.watch import Watch

DEADLINE_S = 60  # of CPU and waiting: a command that opens a FIFO never ends


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    where = Path.cwd()
    os.chdir(path.parent)  # a socket's path may have 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(where)


def link_to_zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("place", [fifo, unix_socket, link_to_zeros])
def test_the_opener_refuses_irregular_files(tmp_path: Path, place: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    place(path)
    with pytest.raises(OSError), open(path, "rb", opener=open_regular):
        pass
    with pytest.raises(OSError), open(path, "ab", opener=open_regular):
        pass
    with pytest.raises(IrregularFileError):
        read_bytes(path)


def test_the_opener_reads_writes_and_creates_files(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb", opener=open_regular) as file:
        file.write(b"one")
    with open(tmp_path / "file", "ab", opener=open_regular) as file:
        file.write(b"two")
    assert read_bytes(tmp_path / "file") == b"onetwo"
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "other")


SOURCE = Path(__file__).parents[2] / "src/redline"
READERS = (
    "training",
    "runs",
    "evaluate",
    "export",
    "recipe/lock.py",
    "data/tokens.py",
    "data/tokens.py",
)


def unguarded(source: str) -> list[str]:
    """Return the calls that would open a file by name without the opener."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        method = isinstance(node.func, ast.Attribute) and name in ("read_text", "read_bytes")
        mode = ast.literal_eval(node.args[1]) if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else "r"
        reads = text.startswith("open(") and isinstance(mode, str) and mode[0] == "r" and "opener=" not in text
        by_name = name in ("safe_open", "load_file", "from_file", "memmap") or text.startswith("np.load(")
        if method or reads or (by_name and "check_regular(" not in text):
            found.append(text)
    return [text for text in found if "/proc" not in text]


def test_every_reader_of_runs_and_tokens_uses_the_opener() -> None:
    files = [
        path for name in READERS for path in ((SOURCE / name).rglob("*.py") if "." not in name else [SOURCE / name])
    ]
    calls = {str(path): unguarded(path.read_text()) for path in files}
    assert all((SOURCE / name).exists() for name in READERS), "a moved module would not be checked"
    # These open files that this process has just written, that belong to the package, or that are open already.
    own = {
        "training/trial.py",
        "export/tensors.py",
        "export/folder.py",
        "export/gguf_folder.py",
        "export/gguf_vocabulary.py",
        "training/mirror.py",
        "training/control.py",
        "runs/live/watch.py",
        "runs/live/server.py",
        "recipe/lock.py",
    }
    assert {path: some for path, some in calls.items() if some and not path.endswith(tuple(own))} == {}
    assert unguarded("(run / 'lock.json').read_text()")
    assert unguarded("open(path, 'rb')")
    assert unguarded("safe_open(path, 'pt')")
    assert not unguarded("open(path, 'rb', opener=regular)")


_FINISHED: list[Path] = []  # trained once: every test changes a copy


@pytest.fixture
def finished(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with every kind of file that a run directory can have."""
    from redline.recipe.lock import make_lock, write_lock

    if _FINISHED:
        return _FINISHED[0]
    path = tmp_path_factory.mktemp("finished") / "run"
    trainer = world.run(path, "train.steps=2", "train.ema=0.9")
    write_lock(path, make_lock("toy", "id", trainer.resolved, trainer.objective.data.facts))
    (path / "trouble").mkdir()
    (path / "trouble/rank-0.jsonl").write_text("")
    for name in ("report.html", "stop-requested", "ranks.log", "tokenizer.json"):
        (path / name).write_text("")
    _FINISHED.append(path)
    return path


STEP = "checkpoints/step-00000002"
FILES = (
    ".lock",
    "lock.json",
    "events.jsonl",
    "report.html",
    "stop-requested",
    "ranks.log",
    "tokenizer.json",
    "trouble/rank-0.jsonl",
    f"{STEP}/manifest.json",
    f"{STEP}/state.json",
    f"{STEP}/model.safetensors",
    f"{STEP}/ema.safetensors",
    f"{STEP}/optimizer.safetensors",
)
COMMANDS = (
    ("runs",),
    ("runs", "prune", "--dry-run"),
    ("stop", "RUN"),
    ("report", "RUN"),
    ("sample", "RUN", "--prompt", "a", "--tokens", "1", "--device", "cpu"),
    ("eval", "RUN", "--device", "cpu"),
    ("export", "RUN", "--out", "exported"),
    ("train", "--resume", "RUN", "train.steps=3"),
    (),
)


def called(words: tuple[str, ...], run: Path) -> int | str | None:
    """Run a command in this process and return its exit code; a traceback fails the test."""
    from redline.cli.main import app

    try:
        app([str(run) if word == "RUN" else word for word in words], standalone_mode=False)
    except (UserError, IrregularFileError):
        return 1
    except SystemExit as leave:
        return leave.code
    return 0


@pytest.fixture
def in_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> Path:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def within_deadline(fork: Any, in_home: Path) -> Callable[[Callable[[], Any]], Any]:
    """Run an action in a fork with a timeout by SIGALRM; return its result."""

    def run(action: Callable[[], Any]) -> Any:
        def watched(_: Any) -> None:
            signal.alarm(DEADLINE_S)
            sys.stdout = sys.stderr = open(in_home / "output", "w")  # noqa: SIM115
            (in_home / "ended.json").write_text(json.dumps(action()))

        (in_home / "ended.json").unlink(missing_ok=True)
        assert fork(watched).wait() == 0, (in_home / "output").read_text()[-3000:]
        return json.loads((in_home / "ended.json").read_text())

    return run


@pytest.mark.parametrize("name", FILES)
def test_no_command_waits_for_a_fifo_in_a_run(within_deadline: Any, finished: Path, in_home: Path, name: str) -> None:
    run = in_home / "runs/run"
    shutil.copytree(finished, run)
    (run / "tokenizer.json").unlink()  # the run's tokenizer is bytes, which has no file
    fifo(run / name)

    def every_command() -> list[Any]:
        codes = []
        for words in COMMANDS:
            print(words, flush=True)
            codes.append(called(words, run))
            shutil.rmtree(in_home / "exported", ignore_errors=True)
        watched = Watch(in_home / "runs").answer([], [])
        return [*codes, len(watched["known"])]

    codes = within_deadline(every_command)
    assert codes[:2] == [0, 0], "one odd run does not keep the others from being listed"
    if name in (f"{STEP}/manifest.json", f"{STEP}/state.json", f"{STEP}/model.safetensors", "lock.json"):
        assert all(codes[4:7]), "sample, eval and export refuse it"


def test_a_log_that_is_a_fifo_is_empty_to_readers_and_refused_to_writers(tmp_path: Path) -> None:
    fifo(tmp_path / "events.jsonl")
    assert read_events(tmp_path / "events.jsonl") == []
    with pytest.raises(IrregularFileError):
        EventLog(tmp_path / "events.jsonl")


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train-00000.tok", "val-00000.tok"])
def test_a_prepared_folder_with_a_fifo_is_refused(within_deadline: Any, corpus: Path, in_home: Path, name: str) -> None:
    from redline.data.prepare import prepare_source, tokenizer_for
    from redline.data.sources import Reading

    tokenizer = tokenizer_for([str(corpus)], "train:300", Reading())
    prepare_source(str(corpus), tokenizer, in_home / "tokens", Reading(), workers=1)
    fifo(in_home / "tokens" / name)

    def opened() -> bool:
        try:
            open_tokens(in_home / "tokens").tokenizer()
        except UserError:
            return False
        return True

    assert within_deadline(opened) is False
