"""Train LatentWire with the flags of its guide.

python scripts/latentwire_train.py --batch_size 4 --gradient_accumulation 16 …
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

try:
    from redline.cli.main import main
    from redline.recipe.aliases import canonical
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed. Run `make setup`, then .venv/bin/python scripts/latentwire_train.py")

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


def overrides(flags: argparse.Namespace, user_keys: set[str]) -> list[str]:
    """Translate the flags into recipe keys, except `user_keys`, which the user set as key=value."""
    keys: dict[str, Any] = {}
    for flag in (*NUMBERS, *SWITCHES):
        text = getattr(flags, flag)
        if text is not None:
            key, value = canonical(flag, {"true": True, "false": False}.get(text, text))
            keys[key] = str(value).lower() if isinstance(value, bool) else value
    if {"train.micro_batch", "train.accumulation"} <= keys.keys():
        # The product of both, times the number of GPUs; the recipe's own global batch would contradict them.
        keys["train.global_batch"] = "auto"
    return [f"{key}={value}" for key, value in keys.items() if key not in user_keys]


def run(arguments: Sequence[str] | None = None) -> None:
    """Print the `redline train` command that the flags amount to, and run it."""
    flags, rest = parser().parse_known_args(arguments)
    for flag, meaning in ALWAYS.items():
        if getattr(flags, flag):
            print(f"--{flag}: {meaning}", file=sys.stderr)
    user_keys = {canonical(word.removeprefix("+").split("=")[0], None)[0] for word in rest if "=" in word}
    # A resumed run has its recipe in its lock, so neither the recipe nor the flags are passed on.
    resumes = any(word.split("=")[0] == "--resume" for word in rest)
    translated = [] if resumes else [RECIPE, *overrides(flags, user_keys)]
    print("redline train", *translated, *rest, file=sys.stderr)
    sys.argv = ["redline", "train", *translated, *rest]
    main()


if __name__ == "__main__":
    run()
