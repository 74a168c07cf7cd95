"""What every process of a benchmark does: one request in, one line out, and no traceback where memory or a package is
missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from redline.errors import UserError


def reply(contend: Callable[[dict[str, Any]], dict[str, Any]], too_large: str = "it does not fit into memory.") -> None:
    request = json.load(sys.stdin)
    try:
        answer = contend(request)
    except UserError as error:
        answer = {"error": error.message()}
    except torch.OutOfMemoryError:
        answer = {"error": too_large}
    except ModuleNotFoundError as error:
        answer = {"error": f"the package {error.name} is not installed."}
    sys.stdout.write(json.dumps(answer) + "\n")


def has_room(attempt: Callable[[], object], optimizer: torch.optim.Optimizer) -> bool:
    """Whether it can be done in this card's memory; its gradients are gone afterwards, either way."""
    try:
        attempt()
        room = True
    except torch.OutOfMemoryError:
        room = False  # what the traceback holds on to is free only after this block
    optimizer.zero_grad(set_to_none=True)
    if not room:
        torch.cuda.empty_cache()
    return room
