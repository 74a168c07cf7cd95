"""Weights are written one tensor at a time, and an export that fails leaves nothing behind."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from redline.errors import UserError
from redline.export import adapter, tensors
from redline.export.folder import export_run
from redline.export.tensors import plan_shards, write_tensors
from redline.kernels.matmul import DTYPES
from redline.models.pretrained import open_base

SHAPES = st.dictionaries(
    st.text("abc.é\"'", min_size=1, max_size=8),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    max_size=6,
)


@given(SHAPES, st.sampled_from(["fp32", "bf16", "fp16"]), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_the_library_reads_what_was_written(shapes: dict[str, Any], dtype: str, shard: int) -> None:
    import tempfile

    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "SHARD", shard)
        folder = Path(place)
        write_tensors(folder, "model", shapes, values.items(), dtype)
        files = sorted(folder.glob("*.safetensors"))
        exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
        index = folder / "model.safetensors.index.json"
        assert index.is_file() == (len(files) > 1)
        if index.is_file():
            places = json.loads(index.read_text())["weight_map"]
            assert all(name in load_file(folder / file) for name, file in places.items())
    assert exported.keys() == values.keys()
    assert all(torch.equal(exported[name], value.to(DTYPES[dtype])) for name, value in values.items())


def test_files_are_as_large_as_they_may_be() -> None:
    shapes = {"a": (10,), "b": (10,), "c": (25,), "d": (5,), "e": (15,)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "SHARD", 80)
        shards = plan_shards("model", shapes, 4)
    assert [list(shard.shapes) for shard in shards] == [["a", "b"], ["c"], ["d", "e"]]
    assert [shard.name for shard in shards][1] == "model-00002-of-00003.safetensors"


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive: list[Any] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1, "the last one at most"
            tensor = torch.ones(100) * number
            alive.append(weakref.ref(tensor))
            yield str(number), tensor
            del tensor

    write_tensors(tmp_path, "model", {str(number): (100,) for number in range(4)}, stream(), "bf16")
    assert len(alive) == 4


def test_in_several_files(
    base_of: Callable[..., Path], tuned: Any, logits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    run, trainer = tuned(base_of("llama"))
    monkeypatch.setattr(tensors, "SHARD", 100_000)
    done = export_run(run, None, tmp_path / "out", merged=True)
    files = [name for name in done.files if name.startswith("model-")]
    assert len(files) > 2
    assert all(done.files[name] < 110_000 for name in files)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (logits(model) - logits(trainer)).abs().max() < 1e-4
    assert open_base(str(tmp_path / "out")).model["layers"] == 2


class Disk:
    """A file on a disk that is full after some writes."""

    def __init__(self, path: Path, mode: str, room: int) -> None:
        self.path, self.mode, self.room = path, mode, room

    def __enter__(self) -> Disk:
        self.file = self.path.open(self.mode)
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def write(self, data: Any) -> None:
        if not self.room:
            raise OSError(28, "No space left on device")
        self.room -= 1
        self.file.write(data)


@pytest.mark.parametrize("room", [0, 1, 5])
@pytest.mark.parametrize("merged", [True, False], ids=["merged", "adapter"])
def test_a_full_disk_leaves_nothing(
    tiny_base: Path, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, merged: bool
) -> None:
    run, _ = tuned(tiny_base)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(tensors, "open", lambda path, mode: Disk(path, mode, room), raising=False)
    with pytest.raises(UserError, match=r"out: cannot be written \(No space left on device\)"):
        export_run(run, None, tmp_path / "out", merged=merged)
    assert sorted(tmp_path.iterdir()) == before


def test_an_interruption_leaves_nothing(
    tiny_base: Path, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = tuned(tiny_base)
    before = sorted(tmp_path.iterdir())
    plain, calls = adapter._merged, iter(range(9))

    def merged(*words: Any) -> torch.Tensor:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return plain(*words)

    monkeypatch.setattr(adapter, "_merged", merged)
    with pytest.raises(KeyboardInterrupt):
        export_run(run, None, tmp_path / "out", merged=True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_lies_is_found_out(
    tiny_base: Path, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flipped bit, in a file that is still valid safetensors."""
    run, _ = tuned(tiny_base)
    before = sorted(tmp_path.iterdir())
    plain = tensors._write

    def wrong(path: Path, *words: Any) -> str:
        digest = plain(path, *words)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return digest

    monkeypatch.setattr(tensors, "_write", wrong)
    with pytest.raises(UserError, match="does not read back"):
        export_run(run, None, tmp_path / "out", merged=True)
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_not_finite_is_refused(tiny_base: Path, tuned: Any, tmp_path: Path) -> None:
    from redline.training.checkpoint import Snapshot, commit, newest_valid, read_state, read_tensors

    run, _ = tuned(tiny_base)
    last = newest_valid(run / "checkpoints")
    assert last is not None
    learnt = read_tensors(last, "model")
    learnt["blocks.1.mlp.down.lora_B.down"][0, 0] = 1e6
    commit(run / "checkpoints", Snapshot(4, {"model": learnt}, {**read_state(last), "step": 4}))
    says = r"adapter_model\.safetensors: .*layers\.1\.mlp\.down_proj\.lora_B\.weight is not finite in fp16"
    with pytest.raises(UserError, match=says):
        export_run(run, None, tmp_path / "out", dtype="fp16")
    assert export_run(run, None, tmp_path / "out", dtype="bf16").step == 4
