"""How many samples of a run on Python's sources are Python: 200 samples from four beginnings of held-out lines.

    python -m benchmarks.studies.legibility OUT.json RUN [RUN …] [--temperature T] [--top-p P]

A sample is cut at the end of its last whole top-level statement, because it ends in the middle of one; it counts if
Python's parser accepts what is left and that is more than its first line. The settings are those of the run's own
samples (`eval.sample_temperature`, `eval.sample_top_p`), or the former defaults for runs without these keys.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from redline.api import open_run
from redline.cache import write_atomically
from redline.hardware.probe import detect_machine
from redline.recipe.lock import git_state, versions

PROMPTS = ("def ", "class ", "import ", "# ")
EACH = 50
TOKENS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    options = parser.parse_args()
    rows = [measure(run, options.temperature, options.top_p) for run in options.runs]
    about = {"benchmark": "legibility", "machine": detect_machine("cpu").facts(), "versions": versions()}
    write_atomically(options.out, json.dumps({**about, "git": git_state(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(f"{row['name']}: {row['accepted']} of {row['samples']} are Python", file=sys.stderr)


def measure(path: Path, temperature: float | None, top_p: float | None) -> dict[str, Any]:
    run = open_run(path)
    own = json.loads((path / "lock.json").read_text(encoding="utf-8"))
    chosen = own["recipe"]["eval"]
    temperature = chosen.get("sample_temperature", 0.8) if temperature is None else temperature
    top_p = chosen.get("sample_top_p", 0.95) if top_p is None else top_p
    accepted: dict[str, int] = {}
    for prompt in PROMPTS:
        samples = run.sample(prompt, count=EACH, tokens=TOKENS, seed=0, temperature=temperature, top_p=top_p)
        accepted[prompt] = sum(is_python(prompt + sample.text) for sample in samples)
    return {
        "name": own["recipe_name"],
        "samples": EACH * len(PROMPTS),
        "accepted": sum(accepted.values()),
        "by_prompt": accepted,
        "temperature": temperature,
        "top_p": top_p,
        "lock": {"git": own["git"], "seed": own["seed"]},
    }


def is_python(text: str) -> bool:
    """Return whether the parser accepts the text up to its last whole top-level statement, of at least two lines."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line and not line[0].isspace() and line[0] not in ")]}"]
    cut = lines[: starts[-1]] if starts and starts[-1] > 0 else lines[:-1]
    if sum(bool(line.strip()) for line in cut) < 2:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes, which are the sample's own
        try:
            tree = ast.parse("\n".join(cut))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return bool(tree.body)


if __name__ == "__main__":
    main()
