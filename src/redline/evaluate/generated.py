"""What a model writes, read by another one: generative perplexity."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.data.rows import is_clean
from redline.errors import UserError
from redline.objectives.base import Objective, Sampling

_AT_ONCE = 16  # texts


def generative_perplexity(
    objective: Objective,
    score: Callable[[Path], dict[str, float | None]],
    *,
    count: int,
    tokens: int,
    seed: int = 0,
    where: str,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Of `count` texts drawn as they are likely, without a prompt; `score` has another model read a file of them."""
    begun, texts = time.monotonic(), []
    told(0, count)
    for first in range(0, count, _AT_ONCE):
        some = min(_AT_ONCE, count - first)
        how = Sampling(count=some, tokens=tokens, seed=seed + first, temperature=1.0, top_p=None)
        texts += [sample.text for sample in objective.sample("", how)]
        told(len(texts), count)
    seconds = max(1e-6, time.monotonic() - begun)
    readable = [text for text in texts if text.strip() and is_clean(text)]
    if 2 * len(readable) < len(texts):
        what = f"of the {len(texts)} texts that it wrote, {len(readable)} are text that another model could read."
        raise UserError(what, where=where, fix="Train it for longer.")
    with tempfile.TemporaryDirectory(prefix="redline-texts-") as folder:
        file = Path(folder) / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in readable), encoding="utf-8")
        found = score(file)
    return {
        "generative_perplexity": found["perplexity"],
        "texts": len(texts),
        "texts_read": len(readable),
        "characters": sum(map(len, texts)),
        "texts_per_s": len(texts) / seconds,
    }
