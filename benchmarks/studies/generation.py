"""Generation of redline and of transformers at the same model, on this machine, measured in turns to share the noise.

    python -m benchmarks.studies.generation MODEL OUT.json [--rounds N] [--tokens N] [--device cpu|cuda]

MODEL is what `model.base` may be: a folder, a .gguf file or a hub id. transformers loads the files that redline opens.
Each round times both, one after the other, in the order that the round's number decides: the time to the first token,
and the tokens per second after it, greedy and without a stop token. A row has the medians of all rounds, and the median
over the rounds of the ratio of redline to transformers, which other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from redline.cache import write_atomically
from redline.export.adapter import base_name
from redline.hardware.probe import detect_machine
from redline.models.pretrained import Base, open_base
from redline.recipe.lock import git_state, versions

# name → (length of each prompt)
CASES = {
    "one prompt of 32 tokens": (32,),
    "one prompt of 512 tokens": (512,),
    "8 prompts of 64 tokens": (64,) * 8,
    "8 prompts of 24 to 136 tokens": tuple(range(24, 137, 16)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Returns the seconds from the start to each forward pass's tokens.
Run = Callable[[list[list[int]], int], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    options = parser.parse_args()
    base = open_base(options.model)
    rows = [row for name in options.precision for row in measure(options, base, name)]
    about = {
        "benchmark": "generation",
        "model": base_name(base),
        "machine": detect_machine(options.device).facts(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "git": git_state(),
    }
    write_atomically(options.out, json.dumps({**about, "rows": rows}, indent=1) + "\n")


def measure(options: argparse.Namespace, base: Base, precision: str) -> Iterator[dict[str, Any]]:
    runs, vocab = contenders(base, precision, options.device)
    chance = torch.Generator().manual_seed(0)
    for case, lengths in CASES.items():
        prompts = [torch.randint(vocab, (length,), generator=chance).tolist() for length in lengths]
        times: dict[str, list[list[float]]] = {name: [] for name in runs}
        for number in range(-1, options.rounds):  # the first round only warms up
            order = list(runs) if number % 2 else list(runs)[::-1]
            for name in order:
                gc.collect()
                taken = runs[name](prompts, options.tokens)
                if number >= 0:
                    times[name].append(taken)
        row = {"precision": precision, "case": case, "rounds": options.rounds, **figures(times, len(lengths))}
        print(json.dumps(row), file=sys.stderr)
        yield row


def figures(times: dict[str, list[list[float]]], rows: int) -> dict[str, Any]:
    first = {name: [taken[0] for taken in runs] for name, runs in times.items()}
    rate = {name: [rows * (len(taken) - 1) / (taken[-1] - taken[0]) for taken in runs] for name, runs in times.items()}
    pairs = {
        "first_token_ratio": zip(first["redline"], first["transformers"], strict=True),
        "rate_ratio": zip(rate["redline"], rate["transformers"], strict=True),
    }
    return {
        **{name: round(statistics.median(a / b for a, b in both), 3) for name, both in pairs.items()},
        "first_token_ms": {name: round(1e3 * statistics.median(found), 1) for name, found in first.items()},
        "tokens_per_s": {name: round(statistics.median(found), 2) for name, found in rate.items()},
    }


def contenders(base: Base, precision: str, device: str) -> tuple[dict[str, Run], int]:
    from transformers import AutoModelForCausalLM

    from redline.evaluate import opened_run

    def stated(tree: dict[str, Any], **how: Any) -> Any:
        return validate({**tree, "train": {**tree["train"], "precision": precision}}, **how)

    validate, opened_run.validate = opened_run.validate, stated  # a model that is no run has the machine's precision
    try:
        opened = opened_run.open_pretrained(str(base.folder), writes_only=True, device=device)
    finally:
        opened_run.validate = validate
    ours: Any = opened.objective.model
    loaded: Any = AutoModelForCausalLM.from_pretrained(base.folder, dtype=DTYPES[precision])
    theirs = loaded.to(device).eval()
    vocab = int(theirs.config.vocab_size)

    def redline(prompts: list[list[int]], tokens: int) -> list[float]:
        from redline.models.generate import decode

        begin, taken = time.perf_counter(), []
        for _ in decode(ours, prompts, limits=[tokens] * len(prompts), vocab=vocab):
            taken.append(time.perf_counter() - begin)
        return taken

    def transformers(prompts: list[list[int]], tokens: int) -> list[float]:
        longest, clock = max(map(len, prompts)), Clock()
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        theirs.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(seen, device=device),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock if len(prompts) == 1 else None,
            stopping_criteria=None if len(prompts) == 1 else [clock],
        )
        return clock.taken[-tokens:]

    return {"redline": redline, "transformers": transformers}, vocab


class Clock:
    """Notes the time after each token. A streamer of transformers serves one row only, a stopping criterion any."""

    def __init__(self) -> None:
        self.begin, self.taken = time.perf_counter(), list[float]()

    def put(self, value: torch.Tensor) -> None:
        self.taken.append(time.perf_counter() - self.begin)

    def end(self) -> None:
        return

    def __call__(self, rows: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.put(rows)
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)


if __name__ == "__main__":
    main()
