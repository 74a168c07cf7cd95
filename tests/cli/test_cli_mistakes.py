"""Mistakes of users are answered with one message that names the cause and the fix."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.vocabulary import RECIPE_LOCK_FILE


@pytest.mark.parametrize(
    ("content", "source", "says"),
    [
        (None, "nowhere.txt", "nowhere.txt: no such file or folder. Check the path"),
        (b"", "empty.txt", "empty.txt: the file is empty. Give a file"),
        (b"\x00\x01\x02", "picture.txt", "picture.txt: the file is binary"),
        (b"caf\xe9 " * 100, "latin.txt", "latin.txt: not UTF-8 text (byte 3). Convert it"),
        (b"abc", "odd.bin", "odd.bin: the file has 3 bytes"),
        (
            np.full(500, 40_000, "<u2").tobytes(),
            "other.bin",
            "the token id 40000 is outside the vocabulary of bytes",
        ),
        (b"too short", "short.txt", "the data has 10 tokens, less than one sequence of 33. Give more data"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and " " not in value else "",
)
def test_data_that_cannot_be_trained_on(
    recipe: str, inside: Any, tmp_path: Path, content: bytes | None, source: str, says: str
) -> None:
    if content is not None:
        (tmp_path / source).write_bytes(content)
    answer = inside("train", recipe, f"data.source={source}", "--run", "run")
    assert answer.code == 1
    assert says in answer.message
    assert not (tmp_path / "run" / RECIPE_LOCK_FILE).exists(), "what never began is no run"


def test_prepared_shards_of_another_tokenizer(recipe: str, inside: Any, corpus: Path, tmp_path: Path) -> None:
    from redline.data.prepare import prepare
    from redline.data.sources import ReadStats, source_documents
    from redline.data.tokenizer import load_tokenizer

    prepare(source_documents(str(corpus), ReadStats("")), load_tokenizer("bytes"), tmp_path / "shards")
    answer = inside("train", recipe, "data.source=shards", "data.tokenizer=gpt2")
    assert answer.code == 1
    assert "wrong tokenizer: the tokens were made with bytes" in answer.message
    assert "data.tokenizer=bytes" in answer.message


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("train", "quickstart", "pretrain-350m"), 2, "quickstart, pretrain-350m"),
        (("train", "quickstrat"), 2, "Did you mean 'quickstart'?"),
        (("train", "train.steps"), 2, "train.steps="),
        (("train", "quickstart", "--resume", "latest"), 2, "--resume"),
        (("train", "--resume", "nothing"), 2, "nothing"),
        (("train", "--bogus"), 2, "--bogus"),
        (
            ("sample", "nothing"),
            2,
            "redline train",
        ),
        (("eval", "latest"), 2, "latest"),
        (("report", "nothing"), 2, "nothing"),
        (("stop", "nothing"), 2, "nothing"),
        (("sample", "latest", "--weights", "averaged"), 2, "--weights: 'averaged' is not ema or raw."),
        (("eval", "latest", "--device", "tpu"), 2, "--device: 'tpu' is not auto or cuda or mps or cpu."),
        (("sample", "latest", "--seed", "99999999999999999999999"), 2, "Invalid value for '--seed'"),
        (("sample", "latest", "--seed", "-1"), 2, "Invalid value for '--seed'"),
        (("sample", "latest", "--count", "100000000"), 2, "Invalid value for '--count'"),
        (("sample", "latest", "--tokens", "100000000000"), 2, "Invalid value for '--tokens'"),
        (("eval", "latest", "--tokens", "100000000000"), 2, "Invalid value for '--tokens'"),
        (("eval", ""), 2, "RUN"),
        (("eval", "@best"), 2, "@best"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage(inside: Any, tmp_path: Path, words: tuple[str, ...], code: int, says: str) -> None:
    answer = inside(*words)
    assert answer.code == code
    assert says in answer.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("sample", "latest@99"), 1, "no checkpoint @99. Steps with a checkpoint: 3, 6."),
        (("sample", "latest@soon"), 2, "@best"),
        (("sample", "latest", "--weights", "ema"), 1, "this run has no moving average (train.ema). Use --weights raw."),
        (("eval", "latest", "--data", "nowhere"), 1, "nowhere: no such file or folder."),
        (("stop", "latest"), 1, "redline runs"),
        (("train", "--resume", "latest@3", "train.steps=9"), 2, "Leave out @3"),
        (
            ("train", "--resume", "latest", "train.lr=1"),
            2,
            "only stop conditions and eval, checkpoint, monitor and parallel keys",
        ),
        (("train", "--resume", "latest", "train.steps=-1"), 2, "train.steps: -1 is too small"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_run_that_cannot_do_that(home: Path, inside: Any, words: tuple[str, ...], code: int, says: str) -> None:
    answer = inside(*words, cwd=home)
    assert answer.code == code
    assert says in answer.message


def test_a_sweep_in_the_directory_of_a_run(inside: Any, tmp_path: Path) -> None:
    (tmp_path / "runs/lr").mkdir(parents=True)
    (tmp_path / "runs/lr/sweep.json").write_text("{}")
    for words in (("report", "lr"), ("train", "--resume", "lr"), ("eval", "runs/lr")):
        answer = inside(*words)
        assert answer.code == 2
        assert "lr: this is a sweep, not a run. Name one of its runs: runs/lr/RUN, once" in answer.message


def test_a_run_without_a_checkpoint(home: Path, inside: Any, tmp_path: Path) -> None:
    shutil.copytree((home / "runs/latest").resolve(), tmp_path / "runs/bare")
    shutil.rmtree(tmp_path / "runs/bare/checkpoints")
    answer = inside("sample", "bare")
    assert answer.code == 1
    assert "runs/bare: the run has no valid checkpoint. Train it first." in answer.message


@pytest.mark.parametrize("begun", [True, False], ids=["resumed", "new"])
def test_a_directory_in_use(home: Path, inside: Any, recipe: str, tmp_path: Path, begun: bool) -> None:
    run = tmp_path / "run"
    if begun:
        shutil.copytree((home / "runs/latest").resolve(), run)
    else:
        run.mkdir()
    with open(run / ".lock", "a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answer = inside("train", *(("--resume", "run", "train.steps=9") if begun else (recipe, "--run", "run")))
    assert answer.code == 1
    assert "run: a run is using this directory" in answer.message
    assert "redline stop run" in answer.message


def test_a_run_that_began_meanwhile_is_not_overwritten(
    recipe: str, inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two commands started at once, the other has already ended when this one has loaded its data."""
    from redline.jobs.causal_lm import objective as causal_lm

    plain = causal_lm.load_text

    def slow(recipe: Any, **options: Any) -> Any:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / RECIPE_LOCK_FILE).write_text("the other's")
        return plain(recipe)

    monkeypatch.setattr(causal_lm, "load_text", slow)
    answer = inside("train", recipe, "--run", "run")
    assert answer.code == 2
    assert "holds a run" in answer.message
    assert (tmp_path / "run" / RECIPE_LOCK_FILE).read_text() == "the other's"


def test_an_end_that_is_already_passed_is_reported(home: Path, inside: Any, tmp_path: Path) -> None:
    shutil.copytree((home / "runs/latest").resolve(), tmp_path / "run")
    log = tmp_path / "run/events.jsonl"
    kept = [line for line in log.read_text().splitlines() if json.loads(line)["type"] != "stop"]
    log.write_text("\n".join(kept) + "\n")  # as of one that was killed
    answer = inside("train", "--resume", "run", "train.steps=4")
    assert answer.code == 0
    assert answer.message.count("the run is at step 6 already: its end, step 4, lies behind it") == 1


def test_a_run_that_can_no_longer_be_written(home: Path, inside: Any, tmp_path: Path) -> None:
    """The suggested fix works: `--resume` takes no other `--run`."""
    shutil.copytree((home / "runs/latest").resolve(), tmp_path / "run")
    (tmp_path / "run/.lock").unlink()
    (tmp_path / "run/.lock").mkdir()
    answer = inside("train", "--resume", "run", "train.steps=9")
    assert answer.code == 1
    assert "run: cannot be written (Is a directory). Make it writable, or start a new run elsewhere" in answer.message


def test_a_failed_build_leaves_no_run_directory(recipe: str, inside: Any, tmp_path: Path) -> None:
    answer = inside("train", recipe, "model.attention=cudnn", "--run", "run")
    assert answer.code == 1
    assert "model.attention" in answer.message
    assert not (tmp_path / "run" / RECIPE_LOCK_FILE).exists()
    assert inside("train", recipe, "train.steps=1", "--run", "run").code == 0, "the same directory can be used again"


def test_a_run_directory_that_is_a_file(recipe: str, inside: Any, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    answer = inside("train", recipe, "--run", "run")
    assert answer.code == 2
    assert "run: is a file, not a directory. Choose another --run." in answer.message
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_signals_before_training(
    recipe: str, inside: Any, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    from redline.jobs.causal_lm import objective as causal_lm

    before = signal.getsignal(number)
    monkeypatch.setattr(causal_lm, "load_text", lambda recipe, **options: os.kill(os.getpid(), number))
    answer = inside("train", recipe)
    assert answer.code == code
    assert "Traceback" not in answer.err
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("latest", "--text-key", "body"), "--data"),
        (("latest", "--base", "."), "--base"),
    ],
    ids=["text key", "base"],
)
def test_an_evaluation_option_without_effect_is_refused(home: Path, inside: Any, words: Any, says: str) -> None:
    refused = inside("eval", *words, cwd=home)
    assert (refused.code, says in refused.message) == (2, True), refused.err


def test_ctrl_c_during_the_import_of_torch_ends_the_process(recipe: str, tmp_path: Path) -> None:
    """torch imports numpy in C and ignores exceptions there: the run used to continue with half of numpy."""
    script = (
        "import os, signal, sys\n"
        "class At:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy.matrixlib':\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, At())\n"
        "from redline.cli.main import main\n"
        "main()\n"
    )
    words = [sys.executable, "-c", script, "train", recipe, "--run", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, (tmp_path / "out").exists()) == (130, False), done.stderr


@pytest.mark.parametrize("words", [("--help",), ("plan", "quickstart", "--gpu", "h100"), ("recipes",)], ids=" ".join)
def test_characters_that_the_terminal_cannot_encode(words: tuple[str, ...], tmp_path: Path) -> None:
    odd = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-m", "redline", *words], cwd=tmp_path, env=odd, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams(closed: tuple[int, ...], recipe: str, tmp_path: Path) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    trains = len(closed) == 3  # the others open files, too
    words = ("train", recipe, "--run", "run") if trains else ("prepare", recipe, "--out", "run", "--tokenizer", "bytes")
    command = [sys.executable, "-m", "redline", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, preexec_fn=close)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / ("report.html" if trains else "meta.json")).exists()


@pytest.mark.parametrize("words", [("doctor",), ("plan", "quickstart", "data.source=~no-such-user/x")], ids=" ".join)
def test_a_missing_home_or_working_directory_is_one_sentence(
    words: tuple[str, ...], inside: Any, tmp_path: Path
) -> None:
    command = f'mkdir gone; cd gone; rmdir ../gone; "{sys.executable}" -m redline "$@"'
    done = subprocess.run(["sh", "-c", command, "sh", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    if words[0] == "plan":
        assert "without ~" in inside(*words, cwd=tmp_path).message


def test_a_kernel_that_cannot_run_here_leaves_no_directory(inside: Any, tmp_path: Path) -> None:
    answer = inside("train", "quickstart", "model.attention=cudnn", "train.device=cpu", "--run", str(tmp_path / "run"))
    assert answer.code == 1
    assert "cudnn needs a GPU" in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000 + "run", "é" * 130])
def test_a_run_directory_whose_name_is_too_long(recipe: str, inside: Any, name: str) -> None:
    answer = inside("train", recipe, "train.steps=1", "--run", name)
    assert answer.code == 2
    assert "--run" in answer.err
    assert len(answer.err) < 300, "the name is not repeated in full"


@pytest.mark.parametrize("workers", ["1025", "100000", "100000000000"])
def test_more_workers_than_any_machine_has(recipe: str, inside: Any, workers: str) -> None:
    answer = inside("train", recipe, "train.steps=1", f"data.workers={workers}", "--run", "many")
    assert answer.code == 2
    assert "data.workers" in answer.err
    assert "1024" in answer.err.replace(",", "")
