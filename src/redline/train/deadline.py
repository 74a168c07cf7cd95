"""When the scheduler ends the job: REDLINE_DEADLINE, in unix seconds, as the script of `redline launch` sets it.

Not a goal of the run, as `train.hours` is: the schedule does not see it, and the run goes on in the next job.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from redline.errors import UserError

DEADLINE = "REDLINE_DEADLINE"


class Deadline:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.end = _end(os.environ.get(DEADLINE, ""))

    def within(self, seconds: float) -> bool:
        """Whether it comes before `seconds` are over."""
        return self.clock() + seconds >= self.end


def _end(text: str) -> float:
    if not text:
        return math.inf
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if math.isnan(end):
        fix = "Leave it unset, or set it to unix seconds, such as $(($(date +%s) + 3600))."
        raise UserError(f"{text!r} is not a time.", where=DEADLINE, fix=fix)
    return end
