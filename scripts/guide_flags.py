"""Translate the dashed flags of the H100 guides into recipe keys, and run `redline train` with them.

`latentwire_train.py` uses `recipe_key`, `user_keys`, `resumes` and `run_train` for the flags of its own guide.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

try:
    from redline.cli.main import main
    from redline.recipe.aliases import canonical
except ModuleNotFoundError as error:
    script = Path(sys.argv[0]).name
    sys.exit(f"{error.name} is not installed. Run `make setup`, then .venv/bin/python scripts/{script}")

RECIPE = "pretrain-350m"
ALIASES = {  # flag → its name in redline's table of aliases
    "mixed_precision": "mixed_precision",
    "num_workers": "num_workers",
    "compile_model": "compile_model",
    "flash": "use_flash_attn",
}
TARGET = (
    "the guide's 3.0781 is a validation loss on OpenWebText with a 32k vocabulary. Losses on other text or with "
    "another tokenizer are not comparable with it; bits per byte are. The run trains for its full time; to stop at "
    "that loss, add train.target_loss=3.0781"
)


@dataclass(frozen=True)
class Defaults:
    """The values that a guide's script uses without flags; None: the plan chooses."""

    batch_size: int | None
    gradient_accumulation: int | None
    learning_rate: float | None
    max_hours: float
    without_fp8: tuple[int, int] | None = None  # batch_size and gradient_accumulation with --no_fp8
    more: tuple[str, ...] = ()  # further recipe keys, which no flag changes


def parser(description: str, defaults: Defaults) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=f"{description} All other arguments (key=value, --dry-run, --run DIR) are passed to "
        f"`redline train {RECIPE}`.",
        epilog="See also: redline train --help, docs/seeds.md.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = flags.add_argument

    def shown(value: float | None) -> str:
        return "the plan chooses" if value is None else f"default {value:g}"

    accumulation = defaults.gradient_accumulation
    add("--batch_size", metavar="N", help=f"sequences per micro-batch; {shown(defaults.batch_size)}")
    add(
        "--gradient_accumulation_steps",
        "--gradient_accumulation",
        metavar="N",
        dest="gradient_accumulation",
        help=f"micro-batches per update; {shown(accumulation)}",
    )
    add("--learning_rate", metavar="LR", help=f"peak learning rate; {shown(defaults.learning_rate)}")
    add("--max_hours", metavar="H", help=f"training time; {shown(defaults.max_hours)}")
    add("--mixed_precision", metavar="bf16|fp16|no", help="compute precision; default bf16")
    add("--num_workers", metavar="N", help="threads that prefetch batches; default 2")
    switch: dict[str, Any] = {
        "nargs": "?",
        "const": "true",
        "choices": ("true", "false", "True", "False"),
        "metavar": "true|false",
    }
    add("--compile_model", **switch, help="torch.compile; default: where it is faster")
    add(
        "--use_flash_attn",
        "--use_flash_attention",
        dest="flash",
        **switch,
        help="default: the fastest attention back-end",
    )
    add(
        "--use_fp8",
        action="store_true",
        help="fp8 matrix products; on a GPU without fp8 units the run says so and uses bf16",
    )
    add("--fp8_backend", choices=("auto", "torchao", "native"), help="fp8 implementation, with --use_fp8; default auto")
    larger = defaults.without_fp8
    batch = f"; changes the defaults to batch_size {larger[0]} and gradient_accumulation {larger[1]}" if larger else ""
    add("--no_fp8", action="store_true", help=f"bf16, as without --use_fp8 (for fp16: --mixed_precision fp16){batch}")
    add("--pin_memory", action="store_true", help="always on")
    add("--persistent_workers", action="store_true", help="always on")
    return flags


def recipe_key(flag: str, text: str) -> tuple[str, Any]:
    """Translate a flag and its value by redline's table of aliases."""
    key, value = canonical(flag, {"true": True, "false": False}.get(text.lower(), text))
    return key, str(value).lower() if isinstance(value, bool) else value


def overrides(flags: argparse.Namespace, defaults: Defaults, set_by_user: set[str]) -> list[str]:
    """Translate the flags into recipe keys, except those that the user set as key=value."""
    auto = "auto"
    micro, accumulation = defaults.batch_size, defaults.gradient_accumulation
    if flags.no_fp8 and defaults.without_fp8 and not (flags.batch_size or flags.gradient_accumulation):
        micro, accumulation = defaults.without_fp8
    keys: dict[str, Any] = dict(item.split("=", 1) for item in defaults.more) | {
        "train.micro_batch": flags.batch_size or micro or auto,
        "train.accumulation": flags.gradient_accumulation or accumulation or auto,
        "train.lr": flags.learning_rate or defaults.learning_rate or auto,
        "train.hours": flags.max_hours or defaults.max_hours,
    }
    if "train.global_batch" in set_by_user and not flags.gradient_accumulation:
        keys["train.accumulation"] = auto
    elif auto not in (keys["train.micro_batch"], keys["train.accumulation"]):
        # The product of both; the recipe's own global batch would contradict them.
        keys["train.global_batch"] = auto
    for flag, alias in ALIASES.items():
        text = getattr(flags, flag)
        if text is not None:
            key, value = recipe_key(alias, text)
            keys[key] = value
    if flags.use_fp8:  # wins over --mixed_precision, which then covers only what is not in fp8
        keys |= {"train.precision": "fp8", "train.fp8": flags.fp8_backend or auto}
    return [f"{key}={value}" for key, value in keys.items() if key not in set_by_user]


def remarks(flags: argparse.Namespace) -> list[str]:
    """Return a remark for each flag that means something else here than in the guide."""
    lines = []
    if flags.fp8_backend and not flags.use_fp8:
        lines.append("--fp8_backend: has no effect without --use_fp8")
    if flags.no_fp8:
        lines.append(
            "--no_fp8: trains in bf16 instead of the guide's fp16; bf16 is as fast on an H100 and needs no loss "
            "scaling. For fp16, use --mixed_precision fp16"
        )
    if flags.pin_memory:
        lines.append("--pin_memory: always on with a GPU")
    if flags.persistent_workers:
        lines.append("--persistent_workers: always on: the loader's threads live as long as the run")
    return lines


def user_keys(words: Sequence[str]) -> set[str]:
    """Return the recipe keys that the user set as key=value."""
    return {canonical(word.removeprefix("+").split("=")[0], None)[0] for word in words if "=" in word}


def resumes(words: Sequence[str]) -> bool:
    """Return whether the command resumes a run. Its lock holds the recipe, so recipe and flags are not passed on."""
    return any(word.split("=")[0] == "--resume" for word in words)


def run_train(words: Sequence[str]) -> None:
    """Print the `redline train` command, and run it."""
    print("redline train", *words, file=sys.stderr)
    sys.argv = ["redline", "train", *words]
    main()


def run(description: str, defaults: Defaults, arguments: Sequence[str] | None = None) -> None:
    """Run the `redline train` command that the flags stand for."""
    flag_parser = parser(description, defaults)
    flags, rest = flag_parser.parse_known_args(arguments)
    if flags.use_fp8 and flags.no_fp8:
        flag_parser.error("--use_fp8 and --no_fp8 contradict each other: use one of them")
    for remark in remarks(flags):
        print(remark, file=sys.stderr)
    set_by_user = user_keys(rest)
    translated = [] if resumes(rest) else overrides(flags, defaults, set_by_user)
    recipe = [] if resumes(rest) else [RECIPE]
    if recipe and "train.target_loss" not in set_by_user:
        print(f"target loss: {TARGET}", file=sys.stderr)
    if recipe and "data.source" not in set_by_user:
        print(
            "data.source: the embedded text (Python's own documentation); for your data, add data.source=./my-folder",
            file=sys.stderr,
        )
    run_train([*recipe, *translated, *rest])
