"""The dashed flags of the H100 guides, told to `redline train` in its own words."""

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
    here = Path(sys.argv[0]).name
    sys.exit(f"{error.name} is not installed here: run `make setup`, then .venv/bin/python scripts/{here}")

RECIPE = "pretrain-350m"
SAME = {  # flags that are other spellings of a recipe key
    "mixed_precision": "mixed_precision",
    "num_workers": "num_workers",
    "compile_model": "compile_model",
    "flash": "use_flash_attn",
}
TARGET = (
    "the guide's 3.0781 is a validation loss on OpenWebText with a vocabulary of 32k; on other text or with another "
    "tokenizer the number means something else (bits per byte compares). The run goes on below it, for all of its "
    "time; train.target_loss=3.0781 stops there"
)


@dataclass(frozen=True)
class Defaults:
    """What a guide's script does when no flag is given; None leaves it to the plan."""

    batch_size: int | None
    gradient_accumulation: int | None
    learning_rate: float | None
    max_hours: float
    without_fp8: tuple[int, int] | None = None  # batch_size and gradient_accumulation that --no_fp8 stands for
    more: tuple[str, ...] = ()  # overrides that no flag changes


def parser(description: str, defaults: Defaults) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=f"{description} All other words go to `redline train {RECIPE}`: key=value, --dry-run, --run DIR.",
        epilog="The same without the guide's spelling: redline train --help, and docs/seeds.md.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument

    def shown(value: float | None) -> str:
        return "the plan chooses" if value is None else f"default {value:g}"

    accumulation = defaults.gradient_accumulation
    add("--batch_size", metavar="N", help=f"sequences per forward and backward; {shown(defaults.batch_size)}")
    add(
        "--gradient_accumulation_steps",
        "--gradient_accumulation",
        metavar="N",
        dest="gradient_accumulation",
        help=f"micro-batches per update; {shown(accumulation)}",
    )
    add("--learning_rate", metavar="LR", help=f"peak learning rate; {shown(defaults.learning_rate)}")
    add("--max_hours", metavar="H", help=f"training time; {shown(defaults.max_hours)}")
    add("--mixed_precision", metavar="bf16|fp16|no", help="precision of the matrix products; default bf16")
    add("--num_workers", metavar="N", help="threads that make batches ahead; default 2")
    switch: dict[str, Any] = {
        "nargs": "?",
        "const": "true",
        "choices": ("true", "false", "True", "False"),
        "metavar": "true|false",
    }
    add("--compile_model", **switch, help="torch.compile; by default on where it pays")
    add("--use_flash_attn", "--use_flash_attention", dest="flash", **switch, help="default: the fastest back-end")
    add(
        "--use_fp8",
        action="store_true",
        help="fp8 matrix products, where the GPU has units for them; else it says so and goes on in bf16",
    )
    add("--fp8_backend", choices=("auto", "torchao", "native"), help="whose, with --use_fp8; default auto")
    larger = defaults.without_fp8
    batch = f"; batch_size {larger[0]}, gradient_accumulation {larger[1]} unless you give them" if larger else ""
    add("--no_fp8", action="store_true", help=f"bf16, as without --use_fp8; fp16 is --mixed_precision fp16{batch}")
    add("--pin_memory", action="store_true", help="is always on")
    add("--persistent_workers", action="store_true", help="is always on")
    return found


def overrides(given: argparse.Namespace, defaults: Defaults, theirs: set[str]) -> list[str]:
    """The recipe keys that the flags stand for; what the user wrote as key=value (`theirs`) wins."""
    auto = "auto"
    micro, accumulation = defaults.batch_size, defaults.gradient_accumulation
    if given.no_fp8 and defaults.without_fp8 and not (given.batch_size or given.gradient_accumulation):
        micro, accumulation = defaults.without_fp8
    found: dict[str, Any] = dict(item.split("=", 1) for item in defaults.more) | {
        "train.micro_batch": given.batch_size or micro or auto,
        "train.accumulation": given.gradient_accumulation or accumulation or auto,
        "train.lr": given.learning_rate or defaults.learning_rate or auto,
        "train.hours": given.max_hours or defaults.max_hours,
    }
    if "train.global_batch" in theirs and not given.gradient_accumulation:
        found["train.accumulation"] = auto
    elif auto not in (found["train.micro_batch"], found["train.accumulation"]):
        found["train.global_batch"] = auto  # their product, whatever the recipe says
    for flag, alias in SAME.items():
        text = getattr(given, flag)
        if text is not None:
            key, value = canonical(alias, {"true": True, "false": False}.get(text.lower(), text))
            found[key] = str(value).lower() if isinstance(value, bool) else value
    if given.use_fp8:  # whatever the rest is computed in
        found |= {"train.precision": "fp8", "train.fp8": given.fp8_backend or auto}
    return [f"{key}={value}" for key, value in found.items() if key not in theirs]


def remarks(given: argparse.Namespace) -> list[str]:
    """What a flag cannot mean here, said before anything starts."""
    said = []
    if given.fp8_backend and not given.use_fp8:
        said.append("--fp8_backend: does nothing without --use_fp8")
    if given.no_fp8:
        said.append(
            "--no_fp8: bf16, not the guide's fp16: as fast on an H100, and no loss scaling; "
            "--mixed_precision fp16 trains in fp16"
        )
    if given.pin_memory:
        said.append("--pin_memory: always on with a GPU")
    if given.persistent_workers:
        said.append("--persistent_workers: always on, the loader's threads live as long as the run")
    return said


def resumes(words: Sequence[str]) -> bool:
    return any(word.split("=")[0] == "--resume" for word in words)


def run(description: str, defaults: Defaults, words: Sequence[str] | None = None) -> None:
    """Translate, say what became of each flag, and hand over to the `redline` command."""
    flags = parser(description, defaults)
    given, rest = flags.parse_known_args(words)
    if given.use_fp8 and given.no_fp8:
        flags.error("--use_fp8 and --no_fp8 contradict each other: give one of them")
    for remark in remarks(given):
        print(remark, file=sys.stderr)
    theirs = {canonical(word.removeprefix("+").split("=")[0], None)[0] for word in rest if "=" in word}
    mine = [] if resumes(rest) else overrides(given, defaults, theirs)
    recipe = [] if resumes(rest) else [RECIPE]
    if recipe and "train.target_loss" not in theirs:
        print(f"target loss: {TARGET}", file=sys.stderr)
    if recipe and "data.source" not in theirs:
        print("data.source: a text that every Python carries; data.source=./my-folder trains on yours", file=sys.stderr)
    print("redline train", *recipe, *mine, *rest, file=sys.stderr)
    sys.argv = ["redline", "train", *recipe, *mine, *rest]
    main()
