"""Models of which each rank holds rows: frozen bases, 8-bit moments, half precision, and how they are built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_distributed import MODES, TEXT, curve, losses, stop_at

from finetuning import Tuning
from redline.jobs.objective import Objective
from redline.models.adapters import FrozenMatrix
from redline.runs.events import read_events
from redline.training import fsdp
from redline.training.checkpoint import newest_valid, read_tensors, verify
from redline.training.optim import quantised_anew
from several import Several

SHARDED = {mode: how for mode, how in MODES.items() if mode != "ddp"}


def frozen_bytes(trainer: Any) -> int:
    """Return the bytes of the base's matrices that this process holds."""
    found = 0
    for module in trainer.objective.model.modules():
        if isinstance(module, FrozenMatrix):
            parts = [*module.parameters(), *(t for q in module._quantised for t in (q.codes, q.scales))]
            tensors = parts or [module.plain]
            found += sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)
    return found


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("qlora", ()),
        ("qlora", ("model.quant_double=false",)),
        ("lora", ()),
        ("qlora", ("train.optimizer=adamw_8bit", "model.lora.r=64")),
        ("full", ("train.optimizer=muon",)),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_sharded_base_learns_what_a_replicated_one_does(
    several: Several, tiny_base: Path, answers: Path, tmp_path: Path, method: str, more: tuple[str, ...]
) -> None:
    Tuning(several.world, tiny_base, answers, tmp_path)
    options = ("train.micro_batch=1", "train.steps=3", "model.lora.dropout=0", f"finetune.method={method}", *more)
    if method == "full":
        options = tuple(word for word in options if "lora." not in word)

    def count(name: str) -> Any:
        def prepare(trainer: Any) -> None:
            (tmp_path / f"{name}-{trainer.ranks.rank}").write_text(json.dumps(frozen_bytes(trainer)))

        return prepare

    replicated = several.run(tmp_path / "copies", 2, *options, "parallel.mode=ddp", prepare=count("copies"))
    expected = np.array(curve(replicated))
    modes = SHARDED if "train.optimizer=adamw_8bit" not in more else {"rows": SHARDED["rows"]}
    for mode, (size, how) in modes.items():
        found = np.array(curve(several.run(tmp_path / mode, size, *options, *how, prepare=count(mode))))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), mode
        if method != "full":
            held, whole = (json.loads((tmp_path / f"{name}-0").read_text()) for name in (mode, "copies"))
            shards = 2 if "hsdp" in how[0] else size
            assert held == pytest.approx(whole / shards, rel=0.02)


@pytest.mark.parametrize(("width", "sizes", "tolerance"), [("256", (2, 1, 4, 2), 1e-5), ("200", (2, 1, 3, 2), 5e-3)])
def test_moments_in_eight_bits_resume_with_other_numbers_of_ranks(
    several: Several, tmp_path: Path, width: str, sizes: tuple[int, ...], tolerance: float
) -> None:
    """Rows of a rank that end within a block of moments are quantised in other blocks, and anew after a resume."""
    options = (*TEXT[:-1], "train.optimizer=adamw_8bit", "train.global_batch=12", "train.micro_batch=1")
    options += ("train.steps=8", f"model.d_ff={width}")
    alone = losses(several.run(tmp_path / "alone", 1, *options))
    run = tmp_path / "run"
    for size, stop in zip(sizes, (2, 4, 6, 8), strict=True):
        if size == 1:
            several.world.run(run, *options, resume=True, stop_at=stop)
        else:
            several.run(
                *(run, size, *options, "parallel.mode=fsdp"),
                resume=stop > 2,
                prepare=lambda t, s=stop: stop_at(t, s, 0),
            )
        assert verify(newest_valid(run / "checkpoints"))["step"] == stop  # type: ignore[arg-type]
    assert losses(run) == pytest.approx(alone, abs=tolerance)
    saved = read_tensors(newest_valid(run / "checkpoints"), "optimizer")  # type: ignore[arg-type]
    assert sum(name.endswith("_8bit") for name in saved) > 8


def test_blocks_that_stay_the_same_keep_every_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (3, 300), generator=generator, dtype=torch.uint8)
    for signed in (True, False):
        codes[:, ::100] = 0 if signed else 255  # every block has a value of the largest magnitude
        whole, scales = quantised_anew(codes, torch.rand(4, generator=generator), [0], 0, 900, signed=signed)
        again = quantised_anew(whole, scales, [0], 0, 900, signed=signed)
        assert torch.equal(again[0], whole)
        assert torch.equal(again[1], scales)
        part, part_scales = quantised_anew(whole, scales, [0], 256, 512, signed=signed)
        assert torch.equal(part, whole[256:768])
        assert torch.equal(part_scales, scales[1:3])
        rows = [quantised_anew(whole, scales, [0], 300 * row, 300, signed=signed) for row in range(3)]
        joined = torch.cat([row for row, _ in rows]), torch.cat([scale for _, scale in rows])
        back, back_scales = quantised_anew(*joined, [0, 300, 600], 0, 900, signed=signed)
        assert torch.equal(back[:256], whole[:256]), "in the same place in both layouts"
        assert back_scales == pytest.approx(scales, rel=0.1)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_half_precision_gathers_half_the_bytes(several: Several, tmp_path: Path, checkpointing: str) -> None:
    options = (*TEXT, "train.precision=bf16", f"train.grad_checkpointing={checkpointing}")
    gathered = {}

    def count(trainer: Any) -> None:
        plain = trainer._loop

        def loop() -> Any:
            trainer.parallel.traffic.pop()
            stop = plain()
            if trainer.ranks.is_main:
                (tmp_path / "traffic").write_text(json.dumps(vars(trainer.parallel.traffic.pop())))
            return stop

        trainer._loop = loop

    copies = np.array(curve(several.run(tmp_path / "copies", 2, *options, "parallel.mode=ddp")))
    for precision in ("bf16", "fp32"):
        run = several.run(
            *(tmp_path / precision, 2, *options, "parallel.mode=fsdp", f"train.precision={precision}"), prepare=count
        )
        gathered[precision] = json.loads((tmp_path / "traffic").read_text())["gathered"]
        assert np.array(curve(run))[:, 1] == pytest.approx(copies[:, 1], rel=5e-3), precision
    assert gathered["bf16"] * 2 == gathered["fp32"]


@pytest.mark.parametrize("init", ["gpt2", "zero"])
def test_shards_are_rows_of_the_model_of_one_process(several: Several, tmp_path: Path, init: str) -> None:
    """Every rank draws its rows bit for bit as one process draws the whole, and never holds two whole blocks."""

    def watch(trainer: Any) -> None:
        rows = {name: p.detach().clone() for name, p in trainer.parallel.parameters().items()}
        specs = trainer.parallel.shard_specs(rows)
        assert trainer.parallel.shards.built_in_parts
        objective = trainer.objective
        sharded = objective.model
        objective.build(trainer.device)
        whole = dict(objective.model.named_parameters())
        for name, own in rows.items():
            start = specs[name].start
            assert torch.equal(own, whole[name].detach()[start : start + len(own)]), name
        in_parts, seen = objective.build_in_parts(trainer.device), 0
        for number, _ in enumerate(in_parts):
            meta = [all(p.is_meta for p in block.parameters()) for block in objective.model.blocks]
            assert meta == [False] * (number + 1) + [True] * (len(meta) - number - 1)
            assert all(p.is_meta for name, p in objective.model.named_parameters() if "blocks." not in name)
            seen += 1
        assert seen == len(objective.model.blocks)
        assert all(torch.equal(p, whole[name]) for name, p in objective.model.named_parameters())
        objective.model = sharded

    options = (*TEXT, f"model.init={init}", "model.value_embeddings=1", "model.skips=unet", "train.steps=1")
    several.run(tmp_path / "run", 3, *options, "train.global_batch=12", "parallel.mode=fsdp", prepare=watch)


def test_a_job_that_only_builds_whole_is_sharded_too(
    several: Several, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*TEXT, "parallel.mode=fsdp")
    in_parts = several.run(tmp_path / "parts", 2, *options)
    monkeypatch.setattr(fsdp, "builds_in_parts", lambda objective: False)
    assert curve(several.run(tmp_path / "whole", 2, *options)) == curve(in_parts)


def test_a_job_that_overrides_build_alone_is_not_built_in_parts(world: Any) -> None:
    class Plain(Objective):  # type: ignore[misc]
        def build(self, device: torch.device) -> None: ...

    class Parts(Plain):
        def build(self, device: torch.device) -> None: ...
        def build_in_parts(self, device: torch.device) -> Any: ...

    class Inherits(Parts): ...

    class Overrides(Inherits):
        def build(self, device: torch.device) -> None: ...

    answers = [fsdp.builds_in_parts(kind.__new__(kind)) for kind in _concrete(Plain, Parts, Inherits, Overrides)]
    assert answers == [False, True, True, False]


def _concrete(*kinds: Any) -> tuple[Any, ...]:
    for kind in kinds:
        kind.__abstractmethods__ = frozenset()
    return kinds


def test_weights_of_another_run_are_taken_by_rows(several: Several, tmp_path: Path) -> None:
    first = several.run(tmp_path / "first", 1, *TEXT)
    options = (*TEXT, "train.steps=1", "train.lr=1e-9", f"model.init_from={first}")
    alone = losses(several.run(tmp_path / "alone", 1, *options))
    assert losses(several.run(tmp_path / "shares", 3, *options, "train.global_batch=12", "parallel.mode=fsdp"))
    assert losses(several.run(tmp_path / "two", 2, *options, "parallel.mode=fsdp")) == pytest.approx(alone, abs=1e-5)


SEVENTY = """
import resource, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from redline.kernels.attention import Attention, MaskSpec
from redline.models.decoder import Decoder
from redline.planning.shapes import DecoderShape
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
shape = DecoderShape(80, 8192, 64, 8, 128, 28672, 128256, tied=False)
with torch.device("meta"):
    model = Decoder(shape, attention=Attention("dense", MaskSpec(), "meta"))
mesh = init_device_mesh("cpu", (1,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
assert all(p.is_meta for p in model.parameters())
print(sum(p.numel() for p in model.parameters()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_seventy_billion_parameters_are_sharded_in_two_gigabytes() -> None:
    """A model on the meta device, of which nothing has memory before its rank's rows get it."""
    done = subprocess.run([sys.executable, "-c", SEVENTY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    parameters, peak = map(int, done.stdout.split()[-2:])
    assert parameters > 70e9
    assert peak < 2e9


def test_a_run_says_how_it_sums(several: Several, tmp_path: Path) -> None:
    """The chosen mode is what the strategy does."""

    def check(trainer: Any) -> None:
        shards, options = trainer.parallel.shards, trainer.recipe.parallel
        assert (shards.size, shards.replicas, shards.rank) == (2, 2, trainer.ranks.rank % 2)
        assert shards.whole == (options.accumulate == "whole")
        assert trainer.parallel.saves == (trainer.ranks.rank < 2)

    for mode in ("groups", "groups, whole"):
        run = several.run(tmp_path / mode, 4, *TEXT, "train.micro_batch=1", *MODES[mode][1], prepare=check)
        names = sorted(p.name for p in newest_valid(run / "checkpoints").glob("model-*"))  # type: ignore[union-attr]
        assert names == ["model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"]
        assert [e for e in read_events(run / "events.jsonl") if e["type"] == "stop"]
