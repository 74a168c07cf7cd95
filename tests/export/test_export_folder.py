"""The exported folder appears whole or not at all, with the same tokenizer and a model card."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from redline.data.tokenizer import ByteTokenizer, load_tokenizer
from redline.errors import UserError
from redline.export import folder as contents
from redline.export import tensors
from redline.export.folder import byte_definition, export_run, write_tokenizer

transformers = pytest.importorskip("transformers")
FILES = ["README.md", "config.json", "generation_config.json", "model.safetensors", "redline.json"]
TEXT = "the King's light, 3 rivers\n\n\tà 🚀 <b> "


BYTES = byte_definition(ByteTokenizer())
BYTES.encode_special_tokens = True  # as transformers does with split_special_tokens


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_bytes_have_their_own_ids(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    ids = BYTES.encode(text, add_special_tokens=False).ids
    assert ids == ByteTokenizer().encode(text)
    assert BYTES.decode(ids) == text


@pytest.mark.parametrize("spec", ["bytes", "train:400"])
def test_the_tokenizer_gives_the_same_ids(trained: Callable[..., Any], tmp_path: Path, spec: str) -> None:
    run, trainer = trained(f"data.tokenizer={spec}")
    done = export_run(run, None, tmp_path / "out")
    assert sorted(done.files) == sorted([*FILES, "tokenizer.json", "tokenizer_config.json"])
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), trainer.objective.data.tokenizer
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ours.encode(TEXT)
    assert theirs(TEXT)["input_ids"] == [ours.eot, *ours.encode(TEXT)], "a text begins as documents did"
    assert theirs.decode(ours.encode(TEXT)) == TEXT
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.model_max_length) == (ours.eot, ours.eot, 32)


def test_the_definition_keeps_the_runs_fingerprint(tmp_path: Path) -> None:
    own = load_tokenizer("train:300", lambda: ["a river and a stone"] * 9)
    write_tokenizer(own, tmp_path, seq_len=8)
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint == own.fingerprint


def test_it_writes_only_real_tokens(trained: Callable[..., Any], tmp_path: Path) -> None:
    """Padding entries of the vocabulary are never sampled; generation starts and stops at end of text."""
    run, _ = trained()
    export_run(run, None, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == 320
    with torch.no_grad():  # make padding the likeliest by far
        model.lm_head.weight[257:] = 100.0 * model.model.norm.weight.new_ones(320 - 257, 1) * model.lm_head.weight[5]
    row = model.generate(torch.tensor([[256, 65]]), max_new_tokens=20)[0].tolist()
    assert max(row) <= 256
    assert model.generation_config.eos_token_id == 256


@pytest.mark.parametrize(
    ("dtype", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_precision_asked_for(trained: Callable[..., Any], tmp_path: Path, dtype: str, kind: torch.dtype) -> None:
    run, trainer = trained()
    export_run(run, None, tmp_path / "out", dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == kind
    assert torch.equal(model.model.embed_tokens.weight, trainer.objective.model.embedding.weight.to(kind))


def test_what_fp16_cannot_hold_is_refused(trained: Callable[..., Any], tmp_path: Path, world: Any) -> None:
    from redline.training.checkpoint import Snapshot, commit, newest_valid, read_state, read_tensors

    run, _ = trained()
    last = newest_valid(run / "checkpoints")
    assert last is not None
    tensors = read_tensors(last, "model")
    tensors["norm.weight"][0] = 1e6
    commit(run / "checkpoints", Snapshot(3, {"model": tensors}, {**read_state(last), "step": 3}))
    with pytest.raises(UserError, match=r"model\.norm\.weight is not finite in fp16\. Use --dtype bf16 or fp32\."):
        export_run(run, None, tmp_path / "out", dtype="fp16")
    assert export_run(run, None, tmp_path / "out", dtype="bf16").step == 3


def test_the_average_or_the_weights(trained: Callable[..., Any], tmp_path: Path) -> None:
    run, trainer = trained("train.ema=0.9")
    assert export_run(run, None, tmp_path / "ema").weights == "ema"
    assert export_run(run, None, tmp_path / "raw", weights="raw").weights == "raw"
    name = "model.embed_tokens.weight"
    assert torch.equal(load_file(tmp_path / "ema/model.safetensors")[name], trainer.ema.average["embedding.weight"])
    raw = load_file(tmp_path / "raw/model.safetensors")[name]
    assert torch.equal(raw, trainer.objective.model.embedding.weight)
    assert "measured on the moving average" in (tmp_path / "raw/README.md").read_text()


def test_the_card(trained: Callable[..., Any], tmp_path: Path, world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, trainer = trained()
    export_run(run, None, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers"
    assert "llama" in front["tags"] or "qwen3" in front["tags"]
    facts, loss = trainer.objective.data.facts, trainer.state.best_loss
    expected_texts = (
        str(world.corpus),
        facts.fingerprint,
        f"{loss:.4f}",
        "bits per byte",
        "updates: 2",
        "512",
        "a CPU",
    )
    assert [words for words in expected_texts if words not in card] == []
    assert yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])["train"]["steps"] == 2
    code = card.split("```python\n")[1].split("```")[0].replace("PATH-OF-THIS-FOLDER", str(tmp_path / "out"))
    (tmp_path / "load.py").write_text(code)
    runpy.run_path(str(tmp_path / "load.py"))
    assert capsys.readouterr().out.startswith("The "), "what the card tells people to type works"


def test_without_the_tokenizers_files(trained: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    """Token files of GPT-2 can be trained on, and exported, on a machine without its vocabulary."""
    run, _ = trained()
    monkeypatch.setenv("REDLINE_GPT2", str(tmp_path / "nowhere"))
    lock = json.loads((run / "lock.json").read_text())
    lock["data"] |= {"tokenizer": "gpt2", "vocab_size": 257}
    (run / "lock.json").write_text(json.dumps(lock))
    messages: list[str] = []
    done = export_run(run, None, tmp_path / "out", log=messages.append)
    assert not done.tokenizer
    assert sorted(done.files) == sorted(FILES)
    assert "tokenizer gpt2" in messages[0]
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 50256


def test_nothing_is_left_when_the_disk_does_not_take_it(
    trained: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained()
    before = sorted(tmp_path.iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(contents, "model_card", full)
        with pytest.raises(UserError, match="No space left on device"):
            export_run(run, None, tmp_path / "out")
    with monkeypatch.context() as broken:
        broken.setattr(tensors, "file_digest", lambda path: "of something else")
        with pytest.raises(UserError, match="does not read back"):
            export_run(run, None, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_there_stays(trained: Callable[..., Any], tmp_path: Path) -> None:
    run, _ = trained()
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        export_run(run, None, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    with pytest.raises(UserError, match="is a file, not a folder"):
        export_run(run, None, out / "mine.txt")
    with pytest.raises(UserError, match="cannot be written"):
        export_run(run, None, out / "mine.txt" / "below")
    (out / "mine.txt").unlink()
    assert export_run(run, None, out).files, "an empty folder is as good as none"
