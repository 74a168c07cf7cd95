"""redline: train language models at the limit of the hardware, and know what that limit is.

import redline

print(redline.plan("pretrain-350m", gpu="h100"))
run = redline.train("quickstart", train={"steps": 100})
print(run.sample("def ")[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redline.api import (
        Model,
        Plan,
        Recipe,
        Run,
        TrainingError,
        open_run,
        plan,
        prepare,
        register_job,
        train,
    )
    from redline.errors import RecipeError, UserError
    from redline.runs.callbacks import (
        Callback,
        CheckpointEvent,
        EvalEvent,
        StepEvent,
        StopEvent,
        StopTraining,
    )

__version__ = "0.2.0"
__all__ = [
    "Callback",
    "CheckpointEvent",
    "EvalEvent",
    "Model",
    "Plan",
    "Recipe",
    "RecipeError",
    "Run",
    "StepEvent",
    "StopEvent",
    "StopTraining",
    "TrainingError",
    "UserError",
    "open_run",
    "plan",
    "prepare",
    "register_job",
    "train",
]

_ERRORS = ("RecipeError", "UserError")
_CALLBACKS = ("Callback", "CheckpointEvent", "EvalEvent", "StepEvent", "StopEvent", "StopTraining")


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: `import redline` alone takes a few milliseconds, and no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'redline' has no attribute {name!r}")
    from redline import errors

    if name not in _ERRORS:
        errors.refuse_windows()
    if name in _ERRORS:
        module: Any = errors
    elif name in _CALLBACKS:
        from redline.runs import callbacks as module
    else:
        from redline import api as module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
