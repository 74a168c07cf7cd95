"""Train LatentWire with the flags of its guide.

python scripts/latentwire_train.py --batch_size 4 --gradient_accumulation 16 …
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from guide_flags import recipe_key, resumes, run_train, user_keys

RECIPE = "latentwire-squad"
NUMBERS = ("batch_size", "gradient_accumulation", "learning_rate", "mixed_precision", "num_workers")
SWITCHES = ("compile_model", "use_flash_attention")
ALWAYS = {
    "pin_memory": "always on with a GPU",
    "persistent_workers": "always on: the loader's threads live as long as the run",
}


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=f"Train LatentWire with the flags of its guide. All other arguments (key=value, --dry-run, "
        f"--run DIR) are passed to `redline train {RECIPE}`.",
        epilog="See also: redline train --help, docs/latentwire.md.",
        allow_abbrev=False,
    )
    for name in NUMBERS:
        flags.add_argument(f"--{name}", metavar="bf16|no" if name == "mixed_precision" else "N")
    for name in SWITCHES:
        flags.add_argument(f"--{name}", nargs="?", const="true", choices=("true", "false"), metavar="true|false")
    for name, meaning in ALWAYS.items():
        flags.add_argument(f"--{name}", action="store_true", help=meaning)
    return flags


def overrides(flags: argparse.Namespace, set_by_user: set[str]) -> list[str]:
    """Translate the flags into recipe keys, except those that the user set as key=value."""
    keys: dict[str, Any] = {}
    for flag in (*NUMBERS, *SWITCHES):
        text = getattr(flags, flag)
        if text is not None:
            key, value = recipe_key(flag, text)
            keys[key] = value
    if {"train.micro_batch", "train.accumulation"} <= keys.keys():
        # The product of both, times the number of GPUs; the recipe's own global batch would contradict them.
        keys["train.global_batch"] = "auto"
    return [f"{key}={value}" for key, value in keys.items() if key not in set_by_user]


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the `redline train` command that the flags stand for."""
    flags, rest = parser().parse_known_args(arguments)
    for flag, meaning in ALWAYS.items():
        if getattr(flags, flag):
            print(f"--{flag}: {meaning}", file=sys.stderr)
    translated = [] if resumes(rest) else [RECIPE, *overrides(flags, user_keys(rest))]
    run_train([*translated, *rest])


if __name__ == "__main__":
    run()
