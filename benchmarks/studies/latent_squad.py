"""Test a latent prefix on real questions: SmolLM2-135M frozen, SQuAD, whole articles held out.

    python -m benchmarks.studies.latent_squad OUT.json SQUAD.json MODEL [key=value …]

MODEL is a .gguf file or a folder (`cat PART … > smollm2.gguf` joins a file that came in parts). Articles are held out
by title. The training articles give their questions and, in addition, rows that ask which words follow some other words
of the same paragraph: these need no label and teach the latents to carry words. Then `redline eval` asks 400 questions
about the held-out articles under four conditions: the text, the latents, as many text tokens as latents, the question
alone.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.studies.runs import redline

HELD_ARTICLES, HELD_QUESTIONS = 4, 400
PER_PARAGRAPH = 24  # rows without a label
SHOWN, ASKED = 4, 4  # words in the question; at most this many in the answer
# For one H200 and at most six minutes: three of training, the rest to unpack, read, compile and evaluate.
WORDS = (
    *("latentwire-smollm2", "latent_prefix.d_z=256", "latent_prefix.slots=32", "latent_prefix.layers=4"),
    # No teacher: with the text, this model answers in sentences, but SQuAD's answers are a word or two (F1 0.025).
    *("latent_prefix.heads=8", "latent_prefix.kd_weight=0"),
    *("data.seq_len=64", "data.val_fraction=0.06", "data.workers=4"),
    *("train.global_batch=128", "train.lr=1e-3", "train.steps=null", "train.hours=3m", "train.warmup_steps=200"),
    *("eval.every=500", "eval.sequences=256", "eval.samples=0", "checkpoint.every=100000", "monitor.log_every=50"),
)


def split(squad: Path, folder: Path) -> dict[str, int]:
    """Write `train.json`, `held.json` and `words.jsonl`; return their numbers of questions and rows."""
    articles = sorted(json.loads(squad.read_text(encoding="utf-8"))["data"], key=lambda article: str(article["title"]))
    rng = random.Random(0)
    rng.shuffle(articles)
    held, train = articles[:HELD_ARTICLES], articles[HELD_ARTICLES:]
    for name, some in (("held", held), ("train", train)):
        (folder / f"{name}.json").write_text(json.dumps({"data": some}), encoding="utf-8")
    rows = [row for article in train for row in next_word_rows(article, rng)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    questions = {name: _questions(some) for name, some in (("held", held), ("train", train))}
    return {**questions, "words": len(rows)}


def _questions(articles: list[dict[str, Any]]) -> int:
    return sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])


def next_word_rows(article: dict[str, Any], rng: random.Random) -> list[dict[str, str]]:
    """Return rows that ask which words follow some other words of a paragraph."""
    rows = []
    for paragraph in article["paragraphs"]:
        words = paragraph["context"].split()
        for _ in range(PER_PARAGRAPH if len(words) > SHOWN + ASKED else 0):
            first = rng.randrange(len(words) - SHOWN - ASKED)
            last = first + SHOWN
            answer = words[last : last + rng.randint(1, ASKED)]
            question = f"Which words follow “{' '.join(words[first:last])}”?"
            about = {"title": article["title"], "context": paragraph["context"]}
            rows.append({**about, "question": question, "answer": " ".join(answer)})
    return rows


def best(run: Path, events: list[dict[str, Any]]) -> str:
    """Return the checkpoint of the lowest loss, or the last one if the evaluation before training was the best."""
    evaluations = [event for event in events if event["type"] == "eval"]
    return f"{run}@best" if min(evaluations, key=lambda event: event["loss"])["step"] else str(run)


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit("usage: python -m benchmarks.studies.latent_squad OUT.json SQUAD.json MODEL [key=value …]")
    out, squad, model, *overrides = sys.argv[1:]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), Path(name) / "run"
        rows = split(Path(squad), folder)
        sources = f"data.source=[{folder / 'train.json'}, {folder / 'words.jsonl'}]"
        redline("train", *WORDS, sources, f"model.base={model}", *overrides, "--run", str(run))
        training_seconds = time.monotonic() - start
        eval_flags = ("--answers", "f1", "--data", str(folder / "held.json"), "--questions", str(HELD_QUESTIONS))
        events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        answers = json.loads(redline("eval", best(run, events), *eval_flags, "--json").splitlines()[-1])
        event_types = ("start", "plan", "step", "eval", "warning", "warmup", "stop")
        result = {
            "words": [*WORDS, *overrides],
            "rows": rows,
            "seconds": {"train": training_seconds, "all": time.monotonic() - start},
            "answers": answers,
            "events": [event for event in events if event["type"] in event_types],
            "lock": json.loads((run / "lock.json").read_text(encoding="utf-8")),
        }
    Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for model_answers in answers["models"].values():
        for condition, marks in model_answers["conditions"].items():
            print(f"{condition:12s} F1 {marks['f1']:.3f}  EM {marks['exact_match']:.3f}  −log p {marks['nll']:.3f}")
    print(f"cosine between latents of different texts {answers['latent_cosine']:.3f}")


if __name__ == "__main__":
    main()
