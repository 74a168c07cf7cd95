"""Training while the text is prepared: the samples depend neither on waiting for it nor on how often it was killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.data import prepare as encode
from redline.data import stream
from redline.data.corpus import open_corpus
from redline.data.loader import WindowIndex
from redline.data.sources import Reading, prepared_folder
from redline.data.stream import StreamSplit, TokenStream, read_state, stream_starts
from redline.data.tokens import open_tokens
from redline.errors import RecipeError, UserError
from redline.recipe.load import load


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stream, "FIRST_SHARD", 3000)
    monkeypatch.setattr(stream, "LARGEST_SHARD", 9000)
    monkeypatch.setattr(stream, "VAL_WITHIN", 5000)
    path = tmp_path / "texts.jsonl"
    with open(path, "w") as file:
        for number in range(900):
            file.write(
                json.dumps({"text": f"Text number {number} says {number * number}.\n" * (1 + number % 4)}) + "\n"
            )
    return path


def data_of(source: Path, *overrides: str) -> Any:
    words = [f"data.source={source}", "data.tokenizer=bytes", "data.stream=true", *overrides]
    return load("pretrain-125m", words).recipe.data


def job_of(source: Path, folder: Path, tokenizer: str = "bytes") -> dict[str, Any]:
    return {
        "source": str(source),
        "tokenizer": tokenizer,
        "reading": asdict(Reading()),
        "workers": 1,
        "folder": str(folder),
        "first_shard": 3000,
        "largest_shard": 9000,
        "val_within": 5000,
    }


def begun(job: dict[str, Any], records: int) -> bool:
    """Prepare as the background process does, but fail after some writes of its state. Return whether it failed."""
    record, left = stream.StreamWriter._record, records

    def stop_after(self: Any, **more: Any) -> None:
        nonlocal left
        record(self, **more)
        left -= 1
        if not left:
            raise RuntimeError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.StreamWriter, "_record", stop_after)
        try:
            stream.write_stream(job)
        except RuntimeError:
            return True
    return False


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_an_epoch_has_every_window_once(sizes: list[int], seq_len: int, seed: int, shuffle: bool) -> None:
    if sum(sizes) <= seq_len:
        return
    windows = len(WindowIndex(sum(sizes), seq_len, 0))
    options: dict[str, Any] = {"seq_len": seq_len, "seed": seed, "shuffle": shuffle}
    epochs = stream_starts(np.arange(3 * windows), sizes, complete=True, **options)
    assert epochs is not None
    for epoch in np.split(epochs, 3):
        assert sorted(epoch) == [window * seq_len for window in range(windows)]
    known = 0
    for count in range(1, len(sizes) + 1):  # with fewer shards finished: the same beginning, within those shards
        tokens = sum(sizes[:count])
        known = max(0, tokens - 1) // seq_len
        early = stream_starts(np.arange(known), sizes[:count], complete=False, **options) if known else epochs[:0]
        assert early is not None
        assert np.array_equal(early, epochs[:known])
        assert all(start + seq_len + 1 <= tokens for start in early)
        assert stream_starts(np.array([known]), sizes[:count], complete=False, **options) is None


def test_shards_are_shuffled_each_epoch_anew() -> None:
    starts = stream_starts(np.arange(400), [1001, 1000], complete=True, seq_len=10, seed=3, shuffle=True)
    assert starts is not None
    first, second = starts[:200], starts[200:]
    assert not np.array_equal(first, second)
    assert first[:100].max() < 1000 <= first[100:].min()
    assert not np.array_equal(first[:100], first[100:] - 1000)


def test_a_stream_in_the_background_gives_what_was_ready(texts: Path) -> None:
    folder = prepared_folder(str(texts), "bytes", Reading(), stream=True)
    assert begun(job_of(texts, folder), 3)
    corpus = open_corpus(data_of(texts))
    train = corpus.tokens.train
    assert isinstance(train, StreamSplit)
    assert corpus.facts.estimated
    assert len(train) < 20_000
    index = corpus.index(32, 5)
    samples = np.arange(2500)
    waited = train.windows(index.starts(samples), 33)
    assert len(read_state(train.stream.folder).train_shards) > 3
    again = open_corpus(data_of(texts))
    assert (again.facts.fingerprint, again.facts.tokenizer_fingerprint) == (
        corpus.facts.fingerprint,
        corpus.facts.tokenizer_fingerprint,
    )
    assert not again.facts.estimated
    ready = again.tokens.train.windows(again.index(32, 5).starts(samples), 33)
    assert np.array_equal(waited, ready)
    val, late = corpus.tokens.val, again.tokens.val
    assert val is not None
    assert late is not None
    assert np.array_equal(val.read(0, len(val)), late.read(0, len(late)))
    assert open_corpus(data_of(texts, "data.stream=false")).facts.fingerprint != corpus.facts.fingerprint


def test_a_killed_preparation_is_reported_and_resumed(texts: Path, tmp_path: Path) -> None:
    assert stream.write_stream(job_of(texts, tmp_path / "whole")) == 0
    folder = tmp_path / "killed"
    assert begun(job_of(texts, folder), 3)
    running = TokenStream(folder, job_of(texts, folder))
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run prepares the same: the background waits for it
        running.start()
        assert running._process is not None
        os.kill(running._process.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"texts\.jsonl: .* killed .*-9.*Resume"):
            running.wait(lambda state: False)
    running.close()
    running.wait(lambda state: False)  # the next wait starts it again
    assert open_tokens(folder).fingerprint == open_tokens(tmp_path / "whole").fingerprint


@pytest.mark.parametrize("tokenizer", ["bytes", "train:300"])
def test_wherever_it_stops_the_shards_are_the_same(texts: Path, tmp_path: Path, tokenizer: str) -> None:
    assert stream.write_stream(job_of(texts, tmp_path / "whole", tokenizer)) == 0
    uninterrupted = open_tokens(tmp_path / "whole")
    uninterrupted.verify()
    stops = 0
    while begun(job_of(texts, tmp_path / "cut", tokenizer), 1 + stops % 2):
        stops += 1
        assert stops < 50
    assert stops >= 3
    described = [json.loads((tmp_path / name / "meta.json").read_text()) for name in ("cut", "whole")]
    assert described[0] == described[1]
    open_tokens(tmp_path / "cut").verify()


def test_a_failure_in_the_background_is_a_user_error(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        encode, "_MIN_CHARACTERS_FOR_WORKERS", 0
    )  # so that what comes first is written before the rest is read
    monkeypatch.setattr(encode, "_BATCH_PIECES", 3)
    with open(texts, "a") as file:
        file.write("no json\n" * 3000)
    assert begun(job_of(texts, prepared_folder(str(texts), "bytes", Reading(), stream=True)), 3)
    corpus = open_corpus(data_of(texts))
    with pytest.raises(UserError, match=r"3,000 of 3,900 rows cannot be used; the first is texts\.jsonl:901: not JSON"):
        corpus.index(32, 5).starts(np.array([10**6]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no text"):
        open_corpus(data_of(tmp_path / "empty"))


def test_a_damaged_stream_is_made_again(texts: Path) -> None:
    corpus = open_corpus(data_of(texts))
    corpus.index(32, 5).starts(np.arange(3000))
    shard = corpus.tokens.source / "train-00001.tok"
    uninterrupted = shard.read_bytes()
    os.truncate(shard, 100)
    again = open_corpus(data_of(texts))
    again.index(32, 5).starts(np.arange(3000))
    open_tokens(again.tokens.source).verify()
    assert shard.read_bytes() == uninterrupted


def test_the_background_ends_with_the_run(texts: Path, tmp_path: Path) -> None:
    running = TokenStream(tmp_path, job_of(texts, tmp_path))
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running.start()
        process = running._process
        assert process is not None
        assert process.stdin is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)  # it waits for the other
        process.stdin.close()
        assert process.wait(10) == 1


def test_an_epoch_or_a_mixture_cannot_be_streamed() -> None:
    for override, problem in (("train.epochs=2", "epoch"), ("data.source=[a, b]", "one source")):
        with pytest.raises(RecipeError, match=rf"data\.stream: .*{problem}"):
            load("pretrain-125m", ["data.stream=true", override])


def test_a_streamed_run_resumes_exactly(texts: Path, world: Any, tmp_path: Path, tensors_of: Any) -> None:
    options = (f"data.source={texts}", "data.stream=true", "train.steps=30")
    uninterrupted = world.run(tmp_path / "whole", *options)
    world.run(tmp_path / "cut", *options, stop_at=11)
    resumed = world.run(tmp_path / "cut", *options, resume=True)
    assert uninterrupted.state.step == resumed.state.step == 30
    first, second = (tensors_of(tmp_path / name / "checkpoints/step-00000030") for name in ("whole", "cut"))
    assert all((first[name] == second[name]).all() for name in first)
