"""From YAML and key=value to a validated recipe — or to every mistake at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from redline.errors import Problem, RecipeError, UsageError, did_you_mean
from redline.jobs.base import is_job, job
from redline.planning.batch import PRESETS
from redline.recipe.aliases import ALIASES, canonical_keys
from redline.recipe.checks import contradictions, idle
from redline.recipe.horizon import replace_stop_conditions
from redline.recipe.schema import Recipe, recipe_class

# ----------------------------------------------------------------------------------------------------
# Other spellings of recipe keys, each mapped to the one name that locks and docs use.


# ----------------------------------------------------------------------------------------------------
# Presets: how much of the memory to fill, and how large a batch, in one word.


def with_preset(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The recipe's keys with those of the command line over them, and the preset's in between.

    A preset scales the batch that the recipe gives. What stands beside it, in the same place or nearer to the
    user, wins over what it sets.
    """
    preset = extra.get("train.preset", base.get("train.preset"))
    if not isinstance(preset, str) or preset not in PRESETS:
        return {**base, **extra}  # none, or one that validation complains about
    fraction, factor = PRESETS[preset]
    given = dict(base)
    if "train.preset" in extra or "train.memory_fraction" not in base:
        given["train.memory_fraction"] = fraction
    given |= _scaled_batch(given, factor)
    return {**given, **extra}


def _scaled_batch(given: dict[str, Any], factor: float) -> dict[str, int]:
    """The global batch, in as many micro-batches as before where the recipe says how large those are."""
    total, micro, accumulation = (
        value if isinstance(value := given.get(f"train.{key}"), int) and not isinstance(value, bool) else None
        for key in ("global_batch", "micro_batch", "accumulation")
    )
    if total and micro and not accumulation and total % micro == 0 and (micro * factor).is_integer():
        return {"train.global_batch": round(total * factor), "train.micro_batch": round(micro * factor)}
    if total is not None:
        return {"train.global_batch": max(1, round(total * factor))}
    return {} if accumulation is None else {"train.accumulation": max(1, round(accumulation * factor))}


def preset_factor(preset: str | None) -> float:
    return PRESETS[preset][1] if preset else 1.0


def preset_text(preset: str) -> str:
    fraction, factor = PRESETS[preset]
    return f"{fraction:.0%} of the memory, the recipe's batch × {factor:g}"


_INTEGER = re.compile(r"^[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_YAML = "tag:yaml.org,2002:"
_LARGEST_FILE = 64 << 10  # bytes; the shipped recipes have two thousand
_DEEPEST = 20  # levels of YAML, or words of a key; the schema has four
_TOO_DEEP = f"not YAML of a recipe: more than {_DEEPEST} levels"
# Recipes state the shape of their base so that it can be planned before it is fetched; another base has its own.
_OF_THE_BASE = tuple(
    f"model.{key}"
    for key in (
        *("layers", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "vocab", "mlp", "tied"),
        *("qk_norm", "qkv_bias", "rope_theta", "rope_scaling", "norm_eps"),
    )
)
_HINTS = 50  # problems with a hint: to find the nearest of all keys takes a moment


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-4 as a number and refuses a key given twice.

    YAML 1.1 also reads 1:30 as ninety, 010 as eight and 2026-01-01 as a date: here a number is decimal, or a text.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if self.check_event(yaml.AliasEvent):  # a few nested ones would unfold to more than any memory
            raise self._refusal("references (*name) have no place in a recipe", event)
        if getattr(event, "tag", None) not in (None, "!"):  # some constructors fail in ways of their own
            raise self._refusal("tags (!name) have no place in a recipe", event)
        if self.depth == _DEEPEST:
            raise self._refusal(_TOO_DEEP, event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level == _DEEPEST:  # before the scanner has looked through all of the brackets
            raise yaml.scanner.ScannerError(None, None, _TOO_DEEP, self.get_mark())
        super().fetch_flow_collection_start(token)

    @staticmethod
    def _refusal(problem: str, event: Any) -> yaml.MarkedYAMLError:
        return yaml.composer.ComposerError(None, None, problem, event.start_mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not a word", key_node.start_mark)
        line = key_node.start_mark.line + 1
        if key in seen:
            problem = f"the key {key!r} is given twice (lines {seen[key]} and {line})"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen[key] = line
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag in (f"{_YAML}bool", f"{_YAML}null")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_YAML}int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_YAML}float", _FLOAT, list("-+.0123456789"))


@dataclass(frozen=True)
class Loaded:
    name: str
    recipe: Recipe
    notes: list[str] = field(default_factory=list)  # one line for each alias used and each stop condition replaced


def shipped() -> dict[str, Path]:
    folder = Path(str(resources.files("redline") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    path = Path(name)
    known = shipped()
    try:
        is_file = path.is_file()
    except OSError:  # a name that is too long for any file, or a folder that may not be entered
        is_file = False
    if name in known and not is_file:
        return known[name]
    if is_file:
        return path
    if path.suffix in {".yaml", ".yml"} or "/" in name:
        raise UsageError(f"there is no recipe file {name!r}.", fix="`redline recipes` lists the shipped ones.")
    if name in known_keys(Recipe):
        raise UsageError(f"{name!r} is a key, not a recipe.", fix=f"Give it a value: {name}=….")
    hint = did_you_mean(name, known) or f"Shipped: {', '.join(known)}."
    raise UsageError(f"there is no recipe {name!r}.", fix=f"{hint} A path to a YAML file works too.")


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # _Loader derives from SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "file"
        raise RecipeError(where, [Problem(line, f"{error.problem}.", "Mend the YAML there.")]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(where, [Problem("file", f"not YAML: {error}.")]) from None


def read_recipe(path: Path, begin: str = "objective: causal_lm") -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        text = content.decode("utf-8") if len(content) <= _LARGEST_FILE else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [Problem("file", f"cannot be read: {error}.")]) from None
    if len(content) > _LARGEST_FILE:
        what = f"is longer than {_LARGEST_FILE >> 10} KiB: a recipe is a page of YAML."
        raise RecipeError(str(path), [Problem("file", what, "Name texts and rows with data.source=….")])
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        what = "is empty." if tree is None else f"holds a {type(tree).__name__}, not sections of keys."
        raise RecipeError(str(path), [Problem("file", what, f"Begin with `{begin}`.")])
    return tree


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    problems = []
    for item in overrides:
        key, separator, text = item.removeprefix("+").partition("=")
        if not separator or not key:
            problems.append(Problem(item, "is not key=value.", "Write for instance train.steps=100."))
            continue
        flat[key] = _override(text)
    if problems:
        raise RecipeError("command line", problems)
    return dict(flatten(flat))


def _override(text: str) -> Any:
    try:
        value = parse_yaml(text, "override") if text else ""
    except RecipeError:
        return text  # a value with YAML punctuation in it, such as a prompt
    return text if value == text.strip() else value  # YAML drops the space at the end of a prompt


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nest(flat: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    tree: dict[str, Any] = {}
    problems = []
    for key, value in flat.items():
        *sections, last = key.split(".")
        if len(sections) >= _DEEPEST:
            problems.append(Problem(f"{key[:40]}…", "is not a key redline knows."))
            continue
        node: Any = tree
        for section in sections:
            node = node.setdefault(section, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and not isinstance(node.get(last), dict):
            node[last] = value
        else:
            problems.append(Problem(key, "is both a section and a value."))
    return tree, problems


def known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in schema.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from known_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _hint(key: str, schema: type[BaseModel]) -> str:
    """The key that was probably meant: the right word in the wrong section, or a slip of the fingers."""
    keys = list(known_keys(schema))
    same_word = [k for k in keys if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if same_word:
        return f"Did you mean {same_word[0]!r}?"
    section, dot, word = key.rpartition(".")
    here = [k.removeprefix(f"{section}.") for k in [*keys, *ALIASES] if dot and k.startswith(f"{section}.")]
    if here:
        known = [name for name in here if f"{section}.{name}" not in ALIASES]
        return did_you_mean(word, here, prefix=f"{section}.") or f"There are {', '.join(known)}."
    top = list(schema.model_fields)
    return did_you_mean(key, [*keys, *ALIASES, *top]) or f"There are {', '.join(top)}."


def _problem(error: Any, schema: type[BaseModel], *, hint: bool) -> Problem:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return Problem(key, "is not a key redline knows.", _hint(key, schema) if hint else "")
    if error["type"] in ("model_type", "model_attributes_type"):
        return Problem(key, f"is a section of keys, not {error['input']!r}.", f"Write {key}.SOMETHING=….")
    return Problem(key, str(error.get("ctx", {}).get("error") or error["msg"]))


def load(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe by name or path, apply the overrides and validate it.

    A typed train.steps, train.tokens or train.epochs replaces all three of the recipe.
    """
    path = find_recipe(name)
    base, notes, problems = canonical_keys(dict(flatten(read_recipe(path))), "file")
    extra, more_notes, more = canonical_keys(parse_overrides(overrides), "command line")
    base, replaced = replace_stop_conditions(base, extra)
    objective = extra.get("objective", base.get("objective"))
    if extra.get("model.base") is not None and base.get("model.base") not in (None, extra["model.base"]):
        base = {key: value for key, value in base.items() if not key.startswith(_OF_THE_BASE)}
    if "data.source" in extra and extra["data.source"] != base.get("data.source") and path in shipped().values():
        # a shipped recipe's prompt is for its own data ("def " for Python): samples then begin as the user's data do
        base |= {"eval.prompt": None} if base.get("eval.prompt") else {}
    given = with_preset(_apart(base, extra), extra)
    own = job(str(objective)).defaults(given) if is_job(objective) else {}
    tree, clashes = nest({**own, **given})
    recipe = validate(tree, where=name, problems=[*problems, *more, *clashes], written=True)
    return Loaded(path.stem, recipe, [*notes, *more_notes, *replaced])


def _apart(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The file's keys, without those that an override replaces by a whole section, or a section of which by a value."""

    def replaced(key: str) -> bool:
        return any(key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in extra)

    return {key: value for key, value in base.items() if not replaced(key)}


def validate(tree: dict[str, Any], *, where: str, problems: Sequence[Problem] = (), written: bool = False) -> Recipe:
    """`written`: by a person, not by a plan that filled in what was left open."""
    found = list(problems)
    schema = recipe_class(tree.get("objective", "causal_lm"))
    try:
        recipe = schema.model_validate(tree)
    except ValidationError as error:
        every = (_problem(e, schema, hint=n < _HINTS) for n, e in enumerate(error.errors()))
        raise RecipeError(where, [*found, *every]) from None
    found += [*contradictions(recipe), *(idle(recipe) if written else ())]
    if found:
        raise RecipeError(where, found)
    return recipe
