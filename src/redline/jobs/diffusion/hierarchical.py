"""hierarchical_diffusion: from a question to a plan, from both to the steps and the answer."""

from __future__ import annotations

from redline.jobs.diffusion.records_objective import (
    RecordObjective,
    can_answer,
    complete,
    load_data,
    random_data,
    tokenizer_alone,
)

create = RecordObjective
__all__ = ["can_answer", "complete", "create", "load_data", "random_data", "tokenizer_alone"]
