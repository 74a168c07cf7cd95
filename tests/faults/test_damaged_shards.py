"""R13: flipped bits in prepared data end the run with the name of the file."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.data import tokens as verify
from redline.data.corpus import open_corpus
from redline.data.prepare import prepare_cached, prepare_source, tokenizer_for
from redline.data.sources import Reading
from redline.data.tokens import (
    HEADER_BYTES,
    BackgroundCheck,
    DamagedDataError,
    TokenFile,
    digest_of,
    open_tokens,
    scan_tokens,
)
from redline.errors import UserError
from redline.recipe.schema import Data
from redline.runs.events import read_events
from redline.runs.summary import run_status
from redline.training.control import RunDirectory
from several import run_ranks


def flip(path: Path, byte: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def tokens(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared folder with its own tokenizer."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    tokenizer = tokenizer_for([str(corpus)], "train:300", Reading())
    return prepare_source(str(corpus), tokenizer, tmp_path / "tokens", Reading(), workers=1).source


def train(world: Any, run: Path, tokens: Path, *overrides: str) -> Any:
    """Train with steps that wait for the background check, as if reading all shards took no longer than one step."""
    checked = threading.Event()
    with RunDirectory(run) as directory:
        trainer = world.trainer(directory, f"data.source={tokens}", "data.tokenizer=train:300", *overrides)
        original = trainer.data_check._verify

        def verified(file: TokenFile) -> None:
            original(file)
            if trainer.data_check._damage or trainer.data_check.progress()["files_verified"] == 2:
                checked.set()

        trainer.data_check._verify = verified
        world.around(trainer, after=lambda n: checked.wait(60))
        try:
            trainer.outcome = trainer.run()
        finally:
            trainer.monitor.log.close()
    return trainer


@pytest.mark.parametrize("file", ["train-00000.tok", "val-00000.tok"])
def test_a_flipped_bit_in_a_shard_ends_the_run(world: Any, tokens: Path, tmp_path: Path, file: str) -> None:
    flip(tokens / file, HEADER_BYTES + 20, 0)  # another id of the vocabulary: only the digest can tell
    with pytest.raises(DamagedDataError) as damage:
        train(world, tmp_path / "run", tokens, "train.steps=4", "checkpoint.every=1")
    assert damage.value.where == str(tokens / file)
    assert damage.value.exit_code == 1
    events = read_events(tmp_path / "run/events.jsonl")
    assert any(file in event["message"] for event in events if event["type"] == "warning")
    assert (events[-1]["type"], events[-1]["reason"], events[-1]["saved"]) == ("stop", "damaged_data", False)
    assert run_status(tmp_path / "run", events) == "failed"
    saved = list((tmp_path / "run/checkpoints").glob("step-*")) if (tmp_path / "run/checkpoints").exists() else []
    assert saved == [], "the first save comes after the first step, which waited for the check"


def test_intact_shards_are_checked_and_counted(world: Any, tokens: Path, tmp_path: Path) -> None:
    trainer = train(world, tmp_path / "run", tokens, "train.steps=2")
    stop = read_events(tmp_path / "run/events.jsonl")[-1]
    assert (stop["reason"], stop["files"], stop["files_verified"]) == ("steps", 2, 2)
    assert trainer.outcome.exit_code == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "redline-verify"]


def test_an_id_outside_the_vocabulary_is_refused_when_it_is_read(tokens: Path) -> None:
    data = open_tokens(tokens)
    flip(tokens / "train-00000.tok", HEADER_BYTES + 2 * 7 + 1, 7)
    for read in (lambda: data.train.read(0, 20), lambda: data.train.windows(np.array([0, 5]), 8)):
        with pytest.raises(DamagedDataError) as damage:
            read()
        assert damage.value.where == str(tokens / "train-00000.tok")
        assert "token 7 " in damage.value.what
    assert len(data.train.windows(np.array([8]), 8)) == 1, "undamaged data can be read"


def test_a_batch_with_such_an_id_ends_the_run_with_a_stop_event(world: Any, tokens: Path, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, f"data.source={tokens}", "data.tokenizer=train:300", "train.steps=2")
        for place in range(0, 3000, 10):
            flip(tokens / "train-00000.tok", HEADER_BYTES + 2 * place + 1, 7)
        with pytest.raises(DamagedDataError) as damage:
            trainer.run()
    assert damage.value.where == str(tokens / "train-00000.tok")
    assert read_events(tmp_path / "run/events.jsonl")[-1]["reason"] == "damaged_data"


@pytest.mark.parametrize("where", ["check", "batch"])
def test_damage_found_by_another_rank_is_logged(world: Any, tokens: Path, tmp_path: Path, where: str) -> None:
    """Rank 1 finds the damage, between steps or in a batch; rank 0 writes the log."""
    damage = DamagedDataError("is damaged.", where="a file", fix="Copy it.")

    def train(ranks: Any) -> int:
        if ranks.is_main:
            directory = RunDirectory(tmp_path / "run").__enter__()
        ranks.barrier()
        if not ranks.is_main:
            directory = RunDirectory(tmp_path / "other")
            directory.path.mkdir()
        options = (f"data.source={tokens}", "data.tokenizer=train:300", "train.steps=50", "parallel.mode=ddp")
        trainer = world.trainer(directory, *options, ranks=ranks)

        def find(number: int) -> None:
            if number == 3 and not ranks.is_main:
                if where == "batch":
                    raise damage
                trainer.data_check._damage = damage

        world.around(trainer, before=find)
        try:
            trainer.run()
        except DamagedDataError:
            return 1
        except Exception:  # the other rank has exited in the middle of a step
            return 2
        return 0

    codes = run_ranks(2, train, tmp_path / "logs")
    assert codes == ([1, 1] if where == "check" else [2, 1])
    events = read_events(tmp_path / "run/events.jsonl")
    assert (events[-1]["type"], events[-1]["reason"], events[-1]["saved"]) == ("stop", "damaged_data", False)
    assert "a file" in next(e["message"] for e in reversed(events) if e["type"] == "warning")


def test_damage_found_by_the_last_save_is_logged(world: Any, tokens: Path, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, f"data.source={tokens}", "data.tokenizer=train:300", "train.steps=2")
        evaluate_and_sample = trainer.evaluate_and_sample

        def evaluate(label: str) -> None:
            evaluate_and_sample(label)
            if label == "after":
                trainer.data_check._damage = DamagedDataError("is damaged.", where="a file")

        trainer.evaluate_and_sample = evaluate
        with pytest.raises(DamagedDataError):
            trainer.run()
    stop = read_events(tmp_path / "run/events.jsonl")[-1]
    assert (stop["type"], stop["reason"]) == ("stop", "damaged_data")


def file_of(path: Path, count: int) -> TokenFile:
    np.arange(count, dtype="<u2").tofile(path)
    scan = scan_tokens(path, np.dtype("<u2"))
    return TokenFile(path, np.dtype("<u2"), 0, count, scan.sha256, scan.max_id)


def test_reading_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two chunks the thread pauses to keep its rate and its share of time."""
    monkeypatch.setattr(verify, "_VERIFY_CHUNK_BYTES", 1000)
    file, rests = file_of(tmp_path / "a.tok", 5000), list[float]()
    check = BackgroundCheck(lambda: (file,), share=1.0, bytes_per_s=1.0, pause=rests.append)
    check._verify(file)
    assert check.progress() == {"files": 1, "files_verified": 1}
    assert len(rests) == 10
    assert all(900 < rest <= 1000 for rest in rests), "1,000 bytes at 1 byte/s, less what reading took"
    spent = list[float]()
    check = BackgroundCheck(lambda: (file,), share=0.05, bytes_per_s=1e12, pause=spent.append)
    check._verify(file)
    assert min(spent) > 0


def test_files_added_by_a_stream_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_POLL_S", 0.01)
    files = [file_of(tmp_path / "a.tok", 100)]
    later = file_of(tmp_path / "b.tok", 200)
    flip(later.path, 10, 0)
    checked = threading.Event()
    check = BackgroundCheck(lambda: tuple(files))
    original = check._verify
    monkeypatch.setattr(check, "_verify", lambda file: (original(file), file is later and checked.set()))
    with check:
        files.append(later)
        assert checked.wait(60)
        with pytest.raises(DamagedDataError):
            check.poll(lambda _: None)


def test_a_file_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    file = file_of(tmp_path / "a.tok", 100)
    file.path.unlink()
    check, warnings = BackgroundCheck(lambda: (file,)), list[str]()
    check._verify(file)
    check.poll(warnings.append)
    check.poll(warnings.append)
    assert len(warnings) == 1
    assert str(file.path) in warnings[0]
    assert check.progress()["files_verified"] == 0


# --- what describes the tokens


def test_flipped_bits_in_description_and_tokenizer_are_noticed_at_open(tokens: Path, say: Any) -> None:
    rng, tried, same = random.Random(7), 0, 0
    for name in ("meta.json", "tokenizer.json"):
        whole = (tokens / name).read_bytes()
        meaning = json.loads(whole)
        for byte in rng.sample(range(len(whole)), 150):
            bit = rng.randrange(8)
            flip(tokens / name, byte, bit)
            tried += 1
            try:
                open_tokens(tokens)
            except UserError:
                pass
            else:
                same += 1
                assert json.loads((tokens / name).read_bytes()) == meaning, "only the space between words may differ"
                assert name == "meta.json"
            (tokens / name).write_bytes(whole)
    open_tokens(tokens)
    say(
        f"R13: {tried} bits flipped in meta.json and tokenizer.json: {tried - same} noticed, {same} changed only spaces"
    )


def test_folders_of_older_releases_still_open(tokens: Path) -> None:
    meta = json.loads((tokens / "meta.json").read_text())
    del meta["digest"], meta["tokenizer"]["sha256"]
    (tokens / "meta.json").write_text(json.dumps(meta))
    before = open_tokens(tokens)
    (tokens / "tokenizer.json").unlink()
    assert open_tokens(tokens).fingerprint == before.fingerprint


def test_a_damaged_cache_is_prepared_again(corpus: Path, tokens: Path) -> None:
    first = prepare_cached(str(corpus), "train:300")
    definition = (first.source / "tokenizer.json").read_bytes()
    for name in ("meta.json", "tokenizer.json"):
        flip(first.source / name, (first.source / name).stat().st_size // 2, 1)
        again = prepare_cached(str(corpus), "train:300")
        assert (again.source, again.fingerprint) == (first.source, first.fingerprint)
        assert (first.source / "tokenizer.json").read_bytes() == definition
    flip(first.source / "train-00000.tok", HEADER_BYTES, 0)
    check = BackgroundCheck(lambda: first.files)
    check._verify(first.files[0])
    with pytest.raises(DamagedDataError) as damage:
        check.poll(lambda _: None)
    assert str(first.source) in str(damage.value.fix), "the folder to delete"
    shutil.rmtree(first.source)
    prepare_cached(str(corpus), "train:300").verify()


def test_a_damaged_tokenizer_of_several_sources_is_trained_again(corpus: Path, tokens: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("the light of the river and the stone. " * 40)
    data = Data(source=[str(corpus), str(other)], tokenizer="train:300", seq_len=8)  # type: ignore[arg-type]
    before = open_corpus(data).tokens.fingerprint
    (definition,) = Path(os.environ["REDLINE_CACHE"]).glob("tokenizers/*/tokenizer.json")
    whole = definition.read_bytes()
    flip(definition, whole.index(b'"vocab"') + 40, 0)
    assert open_corpus(data).tokens.fingerprint == before
    assert definition.read_bytes() == whole
    definition.with_name("tokenizer.json.sha256").unlink()  # an older release wrote none
    assert open_corpus(data).tokens.fingerprint == before


def test_a_digest_of_a_description_depends_on_all_of_it(tokens: Path) -> None:
    meta = json.loads((tokens / "meta.json").read_text())
    body = {key: value for key, value in meta.items() if key != "digest"}
    assert meta["digest"] == digest_of(body)
    for key in body:
        assert digest_of({**body, key: None}) != meta["digest"]
