"""Train pretrain-350m for two minutes and write its figures together with its lock.

usage: python -m benchmarks.studies.pretrain_350m TOKENS_DIR OUT.json [key=value …]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    source, out, overrides = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        options = ["train.hours=2m", "train.warmup_steps=40", "monitor.log_every=10", "eval.every=100"]
        command = [sys.executable, "-m", "redline", "train", "pretrain-350m", "--run", str(run)]
        subprocess.run([*command, f"data.source={source}", *options, *overrides], check=True)
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        lock = json.loads((run / "lock.json").read_text())
    steps = [e for e in events if e["type"] == "step"]
    evals = [e for e in events if e["type"] == "eval"]
    steady = steps[1:]
    result = {
        "benchmark": "pretrain-350m, two minutes of the real loop",
        "command": "python -m benchmarks.studies.pretrain_350m TOKENS_DIR OUT.json " + " ".join(overrides),
        "tokens_per_s": statistics.median(e["tokens_per_s"] for e in steady),
        "mfu": statistics.median(e["mfu"] for e in steady),
        "mfu_causal": statistics.median(e["mfu_causal"] for e in steady),
        "step_ms": statistics.median(e["step_ms"] for e in steady),
        "data_wait_ms": statistics.median(e["data_wait_ms"] for e in steady),
        "memory_gib": max(e["memory_gib"] for e in steps),
        "memory_plan_gib": lock["memory_gib"]["peak"],
        "power_w": statistics.median(e["power_w"] for e in steady),
        "first_loss": evals[0]["loss"],
        "final_loss": evals[-1]["loss"],
        "tokens": steps[-1]["tokens"],
        "warmup_s": next(e["seconds"] for e in events if e["type"] == "warmup"),
        "stop": events[-1],
        "lock": lock,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    shown = {key: value for key, value in result.items() if key not in ("lock", "stop", "command")}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
