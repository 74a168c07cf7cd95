"""The protocol of a benchmark's child processes: a JSON request on stdin, one line of JSON on stdout.

A child that lacks memory or a package answers with the reason instead of a traceback, so that the other rows go on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from redline.errors import UserError


def reply(measure: Callable[[dict[str, Any]], dict[str, Any]], too_large: str = "it does not fit into memory.") -> None:
    """Answer the request on stdin by `measure`, or by its error."""
    request = json.load(sys.stdin)
    try:
        answer = measure(request)
    except UserError as error:
        answer = {"error": error.message()}
    except torch.OutOfMemoryError:
        answer = {"error": too_large}
    except ModuleNotFoundError as error:
        answer = {"error": f"the package {error.name} is not installed."}
    sys.stdout.write(json.dumps(answer) + "\n")


def has_room(attempt: Callable[[], object], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `attempt` fits into the GPU's memory; its gradients are freed either way."""
    try:
        attempt()
        room = True
    except torch.OutOfMemoryError:
        room = False  # the traceback keeps tensors alive until this block ends
    optimizer.zero_grad(set_to_none=True)
    if not room:
        torch.cuda.empty_cache()
    return room
