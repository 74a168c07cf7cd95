"""R15: secrets in environment variables appear in no file and no output, however a run ends."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.errors import UserError, is_secret_name, redact
from redline.hardware.machine import Machine
from redline.recipe.load import load
from redline.recipe.lock import locked_recipe, make_lock
from redline.recipe.resolve import DataFacts, resolve
from redline.runs.events import EventLog
from redline.training.trainer import Trainer

CANARIES = {
    "HF_TOKEN": "hf_CanaryOfTheHub0123456789",
    "HUGGING_FACE_HUB_TOKEN": "hf_CanaryOfTheOldName98765",
    "WANDB_API_KEY": "canary5of5the5tracker5aaaaaaaaaaaaaaaaaaa",
    "AWS_SECRET_ACCESS_KEY": "canary/of+the/bucket/BBBBBBBBBBBBBBBBBBB",
    "REDLINE_PASSWORD": "canary-of-our-own-kind",
    "DB_PASS": "canary-of-a-database",
    "GITHUB_PAT": "ghp_CanaryOfAForge0123456789",
    "PGPASSWORD": "canary-of-postgres",
}
LOGIN = "canary-in-an-address"
RECIPE = """
model: {layers: 2, d_model: 32, heads: 2, d_ff: 64}
data: {source: CORPUS, tokenizer: bytes, seq_len: 32, workers: 1}
train: {device: cpu, precision: fp32, compile: false, steps: 6, global_batch: 8, micro_batch: 4, warmup_steps: 2}
eval: {every: 3, sequences: 4, samples: 1, sample_tokens: 4}
checkpoint: {every: 2}
monitor: {log_every: 1}
"""


class Home:
    """A folder where commands run in their own processes, with secrets in the environment."""

    def __init__(self, fork: Callable[..., Any], path: Path) -> None:
        self.fork, self.path, self.count = fork, path, 0

    def redline(self, *words: str, before: Callable[[], None] = lambda: None) -> int:
        self.count += 1
        output_path = self.path / f"output-{self.count}.txt"

        def act(_: Any) -> int:
            from redline.cli.main import main

            output = os.open(output_path, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
            sys.argv = ["redline", *words]
            before()
            code = 0
            try:
                main()
            except SystemExit as leave:
                code = leave.code if isinstance(leave.code, int) else 0
            sys.stdout.flush()
            sys.stderr.flush()
            return code

        return int(self.fork(act).wait())

    def output(self) -> str:
        """Return the output of the last command."""
        return (self.path / f"output-{self.count}.txt").read_text()

    def leaks(self) -> list[str]:
        """Return `FILE: NAME` for every secret that a file contains."""
        files = [path for path in self.path.rglob("*") if path.is_file()]
        secrets = {**CANARIES, "an address": LOGIN}
        return [
            f"{path.name}: {name}"
            for path in files
            for name, secret in secrets.items()
            if secret.encode() in path.read_bytes()
        ]

    def files(self) -> int:
        return sum(path.is_file() for path in self.path.rglob("*"))


@pytest.fixture
def home(fork: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(RECIPE.replace("CORPUS", str(corpus)))
    return Home(fork, tmp_path)


def make_training_crash() -> None:
    """Make the fourth step fail like a library that quotes its rejected request."""
    build = Trainer.build

    def broken(self: Any, *rest: Any) -> None:
        build(self, *rest)
        step = self.train_step

        def fail(number: int, *more: Any) -> Any:
            if number == 3:
                self.monitor.warn(f"401 for https://me:{LOGIN}@host/x with Bearer {os.environ['HF_TOKEN']}")
                secrets = " ".join(os.environ[name] for name in CANARIES)
                raise RuntimeError(f"refused: https://me:{LOGIN}@host/x {secrets}")
            return step(number, *more)

        self.train_step = fail
        for name in ("clear", "dry_run"):
            setattr(fail, name, getattr(step, name))

    Trainer.build = broken  # type: ignore[method-assign]


def make_hub_refuse() -> None:
    """Install a `datasets` package whose errors repeat the token."""
    package = types.ModuleType("datasets")

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError(f"403 with {os.environ['HF_TOKEN']} for https://me:{LOGIN}@host/data")

    package.load_dataset = refuse  # type: ignore[attr-defined]
    sys.modules["datasets"] = package
    os.environ["HF_HUB_OFFLINE"] = "0"


def test_a_run_leaks_no_secret(home: Home, say: Any) -> None:
    run = ("--run", "runs/toy")
    assert home.redline("train", "toy.yaml", *run, "eval.prompt=one", before=make_training_crash) == 1
    assert "RuntimeError" in home.output(), "a crash shows the whole traceback"
    assert "***" in home.output(), "but not the secrets"
    assert home.redline("train", "--resume", "runs/toy") == 0
    for words in (
        ("report",),
        ("report", "--json"),
        ("sample", "--tokens", "4"),
        ("eval",),
        ("export", "--out", "model"),
    ):
        verb, *more = words
        assert home.redline(verb, "runs/toy", *more) == 0, home.output()
    assert home.redline("doctor", "--json") == 0
    assert '"HF_TOKEN"' in home.output()
    assert home.redline("plan", "toy.yaml", "--json") == 0
    assert home.redline("runs") == 0
    assert home.leaks() == []
    say(f"R15: {len(CANARIES) + 1} canaries, {home.count} commands and a crash, {home.files()} files: none found")
    assert home.files() > 20


def test_a_recipe_with_secrets_leaks_none(home: Home) -> None:
    """The lock and the report contain none, even the report of an old lock that does."""
    secrets = " ".join(CANARIES.values())
    words = ("eval.samples=0", f"eval.prompt={secrets} https://me:{LOGIN}@host/x", f"description={secrets}")
    assert home.redline("train", "toy.yaml", "--run", "runs/toy", "train.steps=2", *words) == 0, home.output()
    lock = json.loads((home.path / "runs/toy/lock.json").read_text())
    assert set(lock["withheld"]) == set(CANARIES)
    assert "${HF_TOKEN}" in lock["recipe"]["description"]
    assert (home.path / "runs/toy/report.html").is_file()
    assert home.leaks() == []
    lock["recipe"]["description"] = secrets  # as an older version wrote it
    (home.path / "runs/toy/lock.json").write_text(json.dumps(lock))
    assert home.redline("report", "runs/toy") == 0
    assert {leak.partition(":")[0] for leak in home.leaks()} == {"lock.json"}


def test_a_path_that_contains_a_secret_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    monkeypatch.setenv("SOME_KEY", "a-name-like-any-other")
    source = tmp_path / "a-name-like-any-other" / "text"
    machine = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
    facts = DataFacts(257, 100_000, 5_000, "data", "bytes", "tokenizer")
    recipe = load("pretrain-125m", ["data.tokenizer=bytes", f"data.source={source}"]).recipe
    lock = make_lock("pretrain-125m", "id", resolve(recipe, machine, facts), facts)
    assert "a-name-like-any-other" not in json.dumps(lock)
    assert locked_recipe(tmp_path, lock).recipe.data.source == str(source)
    monkeypatch.delenv("SOME_KEY")
    assert locked_recipe(tmp_path, lock).recipe.data.source == str(tmp_path / "${SOME_KEY}" / "text")
    monkeypatch.setenv("HOME_OF_NOTHING", "value-of-no-secret")
    lock = {**lock, "withheld": ["HOME_OF_NOTHING"], "recipe": {**lock["recipe"], "description": "${HOME_OF_NOTHING}"}}
    assert locked_recipe(tmp_path, lock).recipe.description == "${HOME_OF_NOTHING}", (
        "a lock restores only variables with a secret name"
    )


def test_errors_leak_no_secret(home: Home) -> None:
    address = f"https://me:{LOGIN}@host/x.jsonl"
    toy = ("train", "toy.yaml", "--run", "runs/other")
    for key in ("data.source", "data.tokenizer", "model.init_from", "model.base"):
        assert home.redline(*toy, f"{key}={address}") == 2
        assert any(f"{key}: {why}" in home.output() for why in ("is an address", "'https://***@host/x.jsonl'"))
    assert home.redline("plan", "toy.yaml", f"data.source=[{address}, ./b]") == 2
    assert home.redline("prepare", address, "--out", "tokens") == 2
    assert "***@host" in home.output()
    assert home.redline(*toy, "data.source=owner/name", before=make_hub_refuse) == 1
    assert "403" in home.output()
    assert not (home.path / "runs/other").exists()
    assert home.leaks() == []


def test_what_counts_as_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_TOKEN", "canary-one")
    monkeypatch.setenv("SOME_TOKEN_LONGER", "canary-one-and-more")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-or-true")
    monkeypatch.setenv("SHORT_KEY", "train")
    for name in ("DB_PASS", "GITHUB_PAT", "PGPASSWORD", "SSHPASS", "DB_PWD", "db_password2", "npm-token", "MYTOKEN"):
        assert is_secret_name(name), name
    for name in ("PATH", "LD_LIBRARY_PATH", "PWD", "OLDPWD", "COMPASS_HOME", "TOKENIZERS_PARALLELISM", "KEYBOARD"):
        assert not is_secret_name(name), name
    assert redact("a canary-one, a canary-one-and-more") == "a ***, a ***"
    assert redact("false-or-true, train") == "false-or-true, train"
    assert redact("https://me:word@host/x me@host run@best") == "https://***@host/x me@host run@best"
    log = EventLog(tmp_path / "events.jsonl")
    written = log.emit("warning", message="canary-one", inner={"list": ["canary-one", Path("canary-one")]})
    log.close()
    assert "canary-one" not in str(written)
    assert "canary-one" not in (tmp_path / "events.jsonl").read_text()
    assert str(UserError("plain.", fix="Do.")) == "plain. Do."


def test_planted_defects_are_caught(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: without redaction the canaries would be in the log and in the traceback."""
    for module in ("redline.cli.main", "redline.runs.events"):
        __import__(module)
        monkeypatch.setattr(sys.modules[module], "redact", lambda text: text)
    assert home.redline("train", "toy.yaml", "--run", "runs/toy", before=make_training_crash) == 1
    assert {leak.partition(":")[0] for leak in home.leaks()} == {"events.jsonl", "output-1.txt"}
