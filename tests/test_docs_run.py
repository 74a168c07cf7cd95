"""Every command that README and docs show is run, on models so small that it takes a second."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.errors import EXIT_INTERRUPTED
from redline.training.control import RunDirectory
from test_docs import EXAMPLES, FAILING, HELP, Example, blocks

ROOT = Path(__file__).parents[1]
SMALL = (
    "model.size=null",
    "model.layers=1",
    "model.d_model=32",
    "model.heads=2",
    "model.d_ff=64",
    "data.seq_len=32",
    "train.device=cpu",
    "train.precision=fp32",
    "train.compile=false",
    "train.global_batch=4",
    "train.epochs=null",
    "eval.sequences=4",
    "eval.sample_tokens=8",
)
ON_BASE = (  # from a base, whose shape is its own
    *("data.source=notes", "data.seq_len=32", "train.device=cpu", "train.precision=fp32", "train.compile=false"),
    *("train.global_batch=4", "train.steps=2", "eval.sequences=4", "eval.sample_tokens=8"),
)
TUNED = (  # fine-tuning, of a base with this shape
    *("model.base=base", "model.layers=2", "model.d_model=64", "model.heads=4", "model.kv_heads=2", "model.d_ff=128"),
    *("model.vocab=auto", "model.rope_theta=10000", "data.seq_len=96", "train.device=cpu", "train.precision=fp32"),
    *("model.rope_scaling=null", "model.tied=true", "eval.sequences=4", "eval.sample_tokens=8", "train.steps=2"),
)
PLANNED = (  # diffusion, of a few word problems
    *("model.layers=1", "model.d_model=32", "model.heads=2", "data.source=problems:easy:60", "train.device=cpu"),
    *("train.precision=fp32", "train.global_batch=4", "eval.sequences=4", "eval.samples=0", "train.steps=2"),
)
RECORDS = ("model.d_ff=64", "data.tokenizer=train:300", "train.micro_batch=2", "train.warmup_steps=1")
WIRED = (  # a latent prefix, of a few texts
    *("model.base=base", "model.layers=2", "model.d_model=64", "model.heads=4", "model.kv_heads=2", "model.d_ff=128"),
    *("model.vocab=auto", "model.rope_theta=10000", "latent_prefix.d_z=16", "latent_prefix.slots=4"),
    *("latent_prefix.bytes=64", "train.device=cpu", "train.precision=fp32", "train.global_batch=4", "train.steps=2"),
    *(
        "eval.sequences=4",
        "eval.sample_tokens=8",
        "latent_prefix.others=[]",
        "model.rope_scaling=null",
        "model.tied=true",
    ),
)
# What the error says of a command that is refused, as its page states, or that needs a network, an account or files.
SENTENCES = {
    "700000": "is impossible",
    "owner/name:en@train": "no such file or folder",
    "data.source=./tokens-hub": "no such file or folder",
    "Skylion007/openwebtext": "no such file or folder",
    "gpt2": "the GPT-2 tokenizer's files are not on this machine",
    "monitor.wandb=my-project": "needs the package wandb",
    "me/my-model": "HF_HUB_OFFLINE is set",
    "me/my-model-gguf": "HF_HUB_OFFLINE is set",
}
# Benchmarks take long: tests/cli/test_cli_bench.py runs each of them once.
SHOWN = [e for e in EXAMPLES if e not in (*HELP, *FAILING) and e.words[0] != "bench"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tiny_base: Path, answers: Path) -> Path:
    """Return a folder with what the pages assume: texts, tokens, recipe files, and runs by the names they use."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(corpus, folder / "notes")
    (folder / "notes" / "slicings.txt").write_text("red line train token\n" * 40)
    shutil.copytree(tiny_base, folder / "base")
    shutil.copy(answers, folder / "train.jsonl")
    sums = [{"question": f"What is {n} + 2?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"} for n in range(40)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    rows = "".join(json.dumps({"content": f"the river and the stone, part {n}"}) + "\n" for n in range(200))
    (folder / "corpus.jsonl").write_text(rows)
    (folder / "squad.json").write_text(json.dumps({"data": [_article(number) for number in range(40)]}))
    (folder / "tokens").mkdir()
    np.arange(20_000, dtype="<u2").tofile(folder / "tokens" / "train.bin")
    _write_zst(folder / "corpus.jsonl.zst", rows)
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
            if block.startswith("# ") and block.split("\n", 1)[0].endswith(".yaml"):
                (folder / block[2:].split("\n", 1)[0]).write_text(block, encoding="utf-8")
    trained = ("data.source=notes", "data.tokenizer=train:300", "checkpoint.every=100", "train.steps=100")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert _redline("train", "small.yaml", *SMALL, *trained, "--run", "runs/first") == 0
        assert _redline("train", "qlora-smollm2", "data.source=train.jsonl", *TUNED, "--run", "runs/tuned") == 0
        assert _redline("train", "problems-hdp", *PLANNED, "--run", "runs/plans") == 0
        assert _redline("train", "latentwire-smollm2", "data.source=squad.json", *WIRED, "--run", "runs/wired") == 0
        _run_scripts(folder)
        assert _redline("prepare", "notes", "--out", "tokens-16k", "--tokenizer", "train:16384") == 0
        assert _redline("prepare", "notes", "--out", "tokens-32k", "--tokenizer", "train:32000") == 0
    finally:
        os.chdir(before)
    names = {"first": ("small", "long", "second", "reader"), "tuned": ("orders",)}
    names |= {"plans": ("hdp", "bd3lm"), "wired": ("wire",)}
    for run, copies in names.items():
        for name in copies:
            shutil.copytree(folder / "runs" / run, folder / "runs" / name)
    (folder / "runs" / "latest").unlink(missing_ok=True)
    (folder / "runs" / "latest").symlink_to("first")
    return folder


def _run_scripts(folder: Path) -> None:
    """Run the scripts that a page asks the reader to write; they create its data."""
    for page in (ROOT / "docs").glob("*.md"):
        for block in blocks(page.read_text(encoding="utf-8"), "python"):
            if name := re.match(r"# (\w+\.py)\n", block):
                (folder / name[1]).write_text(block, encoding="utf-8")
                subprocess.run([sys.executable, "-S", name[1]], cwd=folder, check=True, timeout=60)


def _article(number: int) -> dict[str, Any]:
    asked = {"id": str(number), "question": "Which?", "answers": [{"text": "red"}]}
    return {"title": f"stone {number}", "paragraphs": [{"context": f"Stone {number} is red.", "qas": [asked]}]}


def _write_zst(path: Path, rows: str) -> None:
    import zstandard

    path.write_bytes(zstandard.compress(rows.encode()))


def _redline(*words: str) -> int:
    """Run the command in this process; return its exit code."""
    from redline.cli.main import main

    before, handlers, arguments = dict(os.environ), signal.getsignal(signal.SIGTERM), sys.argv
    sys.argv = ["redline", *words]
    try:
        main()
        return 0
    except SystemExit as leave:
        return int(leave.code or 0) if not isinstance(leave.code, str) else 1
    finally:
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGTERM, handlers)


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> Path:
    """Return a copy of `home` as the current directory, so that no command sees what another one wrote."""
    copy = tmp_path / "home"
    shutil.copytree(home, copy, symlinks=True)
    monkeypatch.chdir(copy)
    monkeypatch.delenv("REDLINE_GPT2", raising=False)
    return copy


def smaller(words: tuple[str, ...]) -> list[str]:
    """Return the command with overrides for a model and a number of steps that a test can afford."""
    verb = words[0]
    if verb == "train" and "--resume" in words:
        return [*words, "train.steps=104"]
    if "--dry-run" in words:
        return [*words]
    if verb == "train" and len(words) > 1 and words[1] == "latentwire-facts":  # its questions have many tiny tokens
        return [*words, *WIRED, "data.source=facts:2:200", "data.seq_len=96"]
    if verb == "train" and any(word.startswith("model.base=") for word in words):
        words = tuple("model.base=base" if word.startswith("model.base=") else word for word in words)
        return [*words, *ON_BASE]
    if verb == "train" and len(words) > 1 and words[1].startswith("qlora"):
        return [*words, *TUNED]
    if verb == "train" and len(words) > 1 and words[1].startswith("latentwire"):
        return [*words, *WIRED]
    if verb == "train" and len(words) > 1 and words[1].startswith(("problems", "gsm8k")):
        return [*words, *PLANNED, *(RECORDS if words[1].startswith("gsm8k") else ())]
    if verb == "watch" and "--once" not in words:  # without it the command would not end
        return [*words, "--once"]
    if verb in ("train", "profile") or (verb == "plan" and "--probe" in words):
        data = () if any(word.startswith("data.") for word in words) else ("data.source=notes", "data.tokenizer=bytes")
        if any(word.startswith("model.init_from=") for word in words):  # a run with the tokenizer of its source
            data = ("data.source=notes", "data.tokenizer=train:300")
        words = tuple("2" if words[i - 1] == "--gpus" else word for i, word in enumerate(words))
        return [*words, *SMALL, *data, "train.steps=2"]
    # A model of the hub would be downloaded.
    words = tuple("base" if word.startswith("HuggingFaceTB/") else word for word in words)
    plain = ["--tokenizer", "bytes"] if verb == "prepare" and "--tokenizer" not in words else []
    return ["1" if words[i - 1] == "--workers" else word for i, word in enumerate(words)] + plain


# Commands that print a model's text, the names of runs, or another text with `--once`.
VARYING = {"chat", "play", "runs", "sample"}
NOT_HERE = {"binary files", "sample after step", "SmolLM"}  # needs a picture, more samples, or that model


def names_of(lines: Iterable[str]) -> list[str]:
    """Return the words with which each line of an output begins: `step`, `eval`, `val loss`, `memory-bound`."""
    plain = (re.sub(r"[^\x00-\x7f]+", " ", line) for line in lines if not line.startswith("    "))
    return [re.split(r"\d|  |=", line.strip())[0].strip() for line in plain if line.strip()]


def comparable(words: list[str], shown: tuple[str, ...]) -> bool:
    """Return whether the small command prints lines of the same kinds as the one that a page shows."""
    other_lines = {"--preview", "--sweep"} & set(words) or ("--once" in words) != ("--once" in shown)
    return words[0] not in VARYING and not other_lines


# Several pages show the same command, which is run once.
OUTPUTS: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
for shown in SHOWN:
    OUTPUTS.setdefault(tuple(smaller(shown.words)), []).append(shown.output)
COMMANDS = list({tuple(smaller(example.words)): example for example in reversed(SHOWN)}.values())[::-1]


def made_by(words: list[str]) -> list[Path]:
    """Return what the command will create, which must not exist before."""
    return [Path(words[i + 1]) for i, word in enumerate(words) if word in ("--out", "--run")]


@pytest.mark.parametrize("example", COMMANDS, ids=str)
def test_a_shown_command_does_what_it_says(
    example: Example, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = smaller(example.words)
    monkeypatch.setattr("sys.stdin", io.StringIO())  # a conversation ends with its input
    if words[0] == "play":  # the page would be served until it is interrupted
        monkeypatch.setattr("redline.runs.live.local_server.serve_until_interrupted", lambda *_, **__: None)
    for path in made_by(words):
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    if words[0] == "stop":
        with RunDirectory(here / "runs" / words[1]):  # as if it were running
            status = _redline(*words)
    else:
        status = _redline(*words)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    if status == 0 and comparable(words, example.words):
        now = {*names_of([*printed.err.splitlines(), *printed.out.splitlines()]), *NOT_HERE}
        gone = [name for lines in OUTPUTS.get(tuple(words), []) for name in names_of(lines) if name not in now]
        assert gone == [], f"{example.page} shows lines that begin so, and the command prints none"
    missing = next((sentence for word, sentence in SENTENCES.items() if word in words), None)
    if missing is not None and status:
        assert missing in printed.err
        return
    assert status == (EXIT_INTERRUPTED if words[0] == "play" else 0), printed.err
    if "--json" in words:
        assert json.loads(printed.out.strip().splitlines()[-1])
    if "--dry-run" not in words:
        assert [path for path in made_by(words) if not path.exists()] == []


def test_a_command_that_fails_would_be_noticed(here: Path) -> None:
    run: Callable[..., Any] = test_a_shown_command_does_what_it_says
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        run(Example("", ("eval", "first@99"), ()), here, _Captured(), patch)


class _Captured:
    def readouterr(self) -> Any:
        return type("Printed", (), {"out": "", "err": ""})
