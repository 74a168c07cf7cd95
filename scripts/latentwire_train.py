"""LatentWire with its guide's flags: python scripts/latentwire_train.py --batch_size 4 --gradient_accumulation 16 …"""

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
    sys.exit(f"{error.name} is not installed here: run `make setup`, then .venv/bin/python scripts/latentwire_train.py")

RECIPE = "latentwire-squad"
NUMBERS = ("batch_size", "gradient_accumulation", "learning_rate", "mixed_precision", "num_workers")
SWITCHES = ("compile_model", "use_flash_attention")
ALWAYS = {
    "pin_memory": "always on with a GPU",
    "persistent_workers": "always on, the loader's threads live as long as the run",
}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=f"Train LatentWire as its guide does. All other words go to `redline train {RECIPE}`: "
        "key=value, --dry-run, --run DIR.",
        epilog="The same without the guide's spelling: redline train --help, and docs/latentwire.md.",
        allow_abbrev=False,
    )
    for name in NUMBERS:
        found.add_argument(f"--{name}", metavar="bf16|no" if name == "mixed_precision" else "N")
    for name in SWITCHES:
        found.add_argument(f"--{name}", nargs="?", const="true", choices=("true", "false"), metavar="true|false")
    for name, meaning in ALWAYS.items():
        found.add_argument(f"--{name}", action="store_true", help=meaning)
    return found


def overrides(given: argparse.Namespace, theirs: set[str]) -> list[str]:
    """The recipe keys that the flags stand for; what the user wrote as key=value (`theirs`) wins."""
    found: dict[str, Any] = {}
    for flag in (*NUMBERS, *SWITCHES):
        text = getattr(given, flag)
        if text is not None:
            key, value = canonical(flag, {"true": True, "false": False}.get(text, text))
            found[key] = str(value).lower() if isinstance(value, bool) else value
    if {"train.micro_batch", "train.accumulation"} <= found.keys():
        found["train.global_batch"] = "auto"  # their product, times the GPUs
    return [f"{key}={value}" for key, value in found.items() if key not in theirs]


def run(words: Sequence[str] | None = None) -> None:
    """Translate, say what became of each flag, and hand over to the `redline` command."""
    given, rest = parser().parse_known_args(words)
    for flag, meaning in ALWAYS.items():
        if getattr(given, flag):
            print(f"--{flag}: {meaning}", file=sys.stderr)
    theirs = {canonical(word.removeprefix("+").split("=")[0], None)[0] for word in rest if "=" in word}
    mine = [] if any(word.split("=")[0] == "--resume" for word in rest) else [RECIPE, *overrides(given, theirs)]
    print("redline train", *mine, *rest, file=sys.stderr)
    sys.argv = ["redline", "train", *mine, *rest]
    main()


if __name__ == "__main__":
    run()
