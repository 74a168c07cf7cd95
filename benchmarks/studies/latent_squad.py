"""Whether a latent prefix works on real questions: SmolLM2-135M frozen, SQuAD, articles held out as a whole.

    python -m benchmarks.studies.latent_squad OUT.json SQUAD.json MODEL [key=value …]

MODEL is a .gguf file or a folder (`cat PART … > smollm2.gguf` joins one that came in parts). Articles are held out by
their titles. From those to train on come, besides the questions, rows that ask for the words behind some others of the
same paragraph: they need no label, and teach the wire to carry words. Then `redline eval` asks 400 questions about
the articles held out, from the text, latents, as many tokens as there are latents, and the question alone.
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
SHOWN, ASKED = 4, 4  # words before, and at most so many to tell
# For one H200, and at most six minutes: three of training, the rest to unpack, read, compile and ask.
WORDS = (
    *("latentwire-smollm2", "latent_prefix.d_z=256", "latent_prefix.slots=32", "latent_prefix.layers=4"),
    # no teacher: reading the text, this model answers in sentences, and SQuAD in a word or two (F1 0.025)
    *("latent_prefix.heads=8", "latent_prefix.kd_weight=0"),
    *("data.seq_len=64", "data.val_fraction=0.06", "data.workers=4"),
    *("train.global_batch=128", "train.lr=1e-3", "train.steps=null", "train.hours=3m", "train.warmup_steps=200"),
    *("eval.every=500", "eval.sequences=256", "eval.samples=0", "checkpoint.every=100000", "monitor.log_every=50"),
)


def split(squad: Path, folder: Path) -> dict[str, int]:
    """`train.json`, `held.json` and `words.jsonl`."""
    articles = sorted(json.loads(squad.read_text(encoding="utf-8"))["data"], key=lambda article: str(article["title"]))
    chance = random.Random(0)
    chance.shuffle(articles)
    held, train = articles[:HELD_ARTICLES], articles[HELD_ARTICLES:]
    for name, some in (("held", held), ("train", train)):
        (folder / f"{name}.json").write_text(json.dumps({"data": some}), encoding="utf-8")
    rows = [one for article in train for one in told(article, chance)]
    (folder / "words.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    questions = {name: _questions(some) for name, some in (("held", held), ("train", train))}
    return {**questions, "words": len(rows)}


def _questions(articles: list[dict[str, Any]]) -> int:
    return sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])


def told(article: dict[str, Any], chance: random.Random) -> list[dict[str, str]]:
    found = []
    for paragraph in article["paragraphs"]:
        words = paragraph["context"].split()
        for _ in range(PER_PARAGRAPH if len(words) > SHOWN + ASKED else 0):
            first = chance.randrange(len(words) - SHOWN - ASKED)
            behind = first + SHOWN
            answer = words[behind : behind + chance.randint(1, ASKED)]
            asked = f"Which words follow “{' '.join(words[first:behind])}”?"
            about = {"title": article["title"], "context": paragraph["context"]}
            found.append({**about, "question": asked, "answer": " ".join(answer)})
    return found


def best(run: Path, events: list[dict[str, Any]]) -> str:
    """The weights of the least loss; the last ones, where nothing was learnt."""
    looks = [event for event in events if event["type"] == "eval"]
    return f"{run}@best" if min(looks, key=lambda event: event["loss"])["step"] else str(run)


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit("usage: python -m benchmarks.studies.latent_squad OUT.json SQUAD.json MODEL [key=value …]")
    out, squad, model, *overrides = sys.argv[1:]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), Path(name) / "run"
        rows = split(Path(squad), folder)
        sources = f"data.source=[{folder / 'train.json'}, {folder / 'words.jsonl'}]"
        redline("train", *WORDS, sources, f"model.base={model}", *overrides, "--run", str(run))
        trained = time.monotonic() - begun
        asked = ("--answers", "f1", "--data", str(folder / "held.json"), "--questions", str(HELD_QUESTIONS))
        events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        answers = json.loads(redline("eval", best(run, events), *asked, "--json").splitlines()[-1])
        kept = ("start", "plan", "step", "eval", "warning", "warmup", "stop")
        found = {
            "words": [*WORDS, *overrides],
            "rows": rows,
            "seconds": {"train": trained, "all": time.monotonic() - begun},
            "answers": answers,
            "events": [event for event in events if event["type"] in kept],
            "lock": json.loads((run / "lock.json").read_text(encoding="utf-8")),
        }
    Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for model_found in answers["models"].values():
        for condition, marks in model_found["conditions"].items():
            print(f"{condition:12s} F1 {marks['f1']:.3f}  EM {marks['exact_match']:.3f}  −log p {marks['nll']:.3f}")
    print(f"cosine between latents of different texts {answers['latent_cosine']:.3f}")


if __name__ == "__main__":
    main()
