"""Time one fixed step in every benchmark, to show how fast the GPU is today, independently of redline's code.

    python -m benchmarks.peers.anchor < request.json

The step is GPT-2 medium in plain PyTorch on random tokens: bf16 autocast, fused AdamW, not compiled. It takes seconds,
and changes of redline's kernels and recipes do not affect it. On a CPU the model is tiny.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.peers.gpt2 import MEDIUM, Gpt2, Gpt2Shape, adamw
from benchmarks.reply import reply

SHAPES = {"cuda": (MEDIUM, 16), "cpu": (Gpt2Shape(2, 2, 64, 320, 64), 4)}  # model and sequences per step
STEPS = {"cuda": (5, 30), "cpu": (1, 5)}  # warm-up steps, timed steps


def time_anchor(device: str) -> dict[str, Any]:
    shape, batch = SHAPES[device]
    generator = torch.Generator().manual_seed(0)
    model = Gpt2(shape)
    model.initialise(generator)
    model.to(device)
    optimizer = adamw(model, lr=1e-4, weight_decay=0.1)
    rows = torch.randint(0, shape.vocab, (batch, shape.length + 1), generator=generator).to(device)

    def steps(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(rows[:, :-1], rows[:, 1:].contiguous())
            (loss / rows[:, 1:].numel()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    warmup, timed = STEPS[device]
    steps(warmup)
    return {"step_ms": 1e3 * steps(timed) / timed}


if __name__ == "__main__":
    reply(lambda request: time_anchor(str(request["device"])))
