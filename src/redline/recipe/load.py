"""Load a recipe: YAML and key=value overrides → canonical keys → presets → validated `Recipe`.

All mistakes are collected and raised together in one `RecipeError`, each with the key, what is wrong and how to fix it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from redline.errors import Problem, RecipeError, UsageError, did_you_mean
from redline.fields import AUTO, none_if_auto
from redline.hub import parse_address
from redline.jobs.base import is_job, job
from redline.planning.batch import PRESETS, solve_batch
from redline.planning.communication import SHARDED
from redline.planning.context import indivisible_sequence
from redline.planning.memory import MUON
from redline.planning.schedule import ONE_CYCLE
from redline.planning.shapes import SIZES
from redline.recipe.aliases import ALIASES, canonical_keys
from redline.recipe.schema import Model, Parallel, Recipe, Train, recipe_class
from redline.remote import MIRROR_SCHEMES, is_url, url_problem

# ----------------------------------------------------------------------------------------------------
# Presets: the share of the memory to fill and the size of the batch, in one word.


def _apply_preset(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's keys with the preset's over them, and the overrides over both.

    A preset scales the batch of the recipe. Its memory fraction does not replace one that is set in the same place
    (both in the file, or both as overrides).
    """
    preset = overrides.get("train.preset", base.get("train.preset"))
    if not isinstance(preset, str) or preset not in PRESETS:
        return {**base, **overrides}  # no preset, or an invalid one that validation reports
    fraction, factor = PRESETS[preset]
    keys = dict(base)
    if "train.preset" in overrides or "train.memory_fraction" not in base:
        keys["train.memory_fraction"] = fraction
    keys |= _scaled_batch(keys, factor)
    return {**keys, **overrides}


def _scaled_batch(keys: dict[str, Any], factor: float) -> dict[str, int]:
    """Return the keys of the batch times `factor`. The micro-batch is scaled too if that keeps the accumulation."""
    total, micro, accumulation = (
        value if isinstance(value := keys.get(f"train.{key}"), int) and not isinstance(value, bool) else None
        for key in ("global_batch", "micro_batch", "accumulation")
    )
    if total and micro and not accumulation and total % micro == 0 and (micro * factor).is_integer():
        return {"train.global_batch": round(total * factor), "train.micro_batch": round(micro * factor)}
    if total is not None:
        return {"train.global_batch": max(1, round(total * factor))}
    return {} if accumulation is None else {"train.accumulation": max(1, round(accumulation * factor))}


def preset_factor(preset: str | None) -> float:
    """Return the factor of a preset on the global batch."""
    return PRESETS[preset][1] if preset else 1.0


def preset_text(preset: str) -> str:
    """Describe what a preset sets."""
    fraction, factor = PRESETS[preset]
    return f"{fraction:.0%} of the memory, the recipe's batch × {factor:g}"


# ----------------------------------------------------------------------------------------------------
# Stop conditions: what the user typed replaces what the recipe brings.


STOPS = ("train.steps", "train.tokens", "train.epochs")  # the counted stop conditions; train.hours is a time budget


def replace_stop_conditions(base: Mapping[str, Any], typed: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return `base` without the counted stop conditions that typed ones replace, and a note for each of those.

    Otherwise `train.steps=40` on a recipe of three epochs would end after three epochs, which may be a single step.
    """
    set_keys = [key for key in STOPS if typed.get(key) is not None]
    dropped = [key for key in STOPS if set_keys and key not in typed]
    replacement = " and ".join(f"{key}={typed[key]}" for key in set_keys)
    notes = [f"{replacement} replaces {key}={base[key]} of the recipe" for key in dropped if base.get(key) is not None]
    return {key: value for key, value in base.items() if key not in dropped}, notes


# ----------------------------------------------------------------------------------------------------
# Reading YAML.


_INTEGER = re.compile(r"^[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_YAML = "tag:yaml.org,2002:"
_LARGEST_FILE = 64 << 10  # bytes; the shipped recipes have about two thousand
_MOST_LEVELS = 20  # of YAML, or words in a key; the schema has four
_TOO_DEEP = f"more than {_MOST_LEVELS} levels"
# Keys of a recipe's file that describe the model it was written for: its shape, how it is initialised, its tokenizer,
# and learning rates by role. They do not apply to another base.
_KEYS_OF_MODEL = (
    *(
        f"model.{key}"
        for key in (
            *("size", "layers", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "vocab", "mlp", "tied"),
            *("qk_norm", "qkv_bias", "rope_theta", "rope_scaling", "norm_eps", "softcap", "value_embeddings", "skips"),
            *("init", "embedding_std"),
        )
    ),
    *("data.tokenizer", "train.embedding_lr", "train.head_lr", "train.scalar_lr"),
)
_MOST_HINTS = 50  # problems that get a hint: searching for the most similar key takes milliseconds


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that reads 1e-4 as a number and refuses duplicate keys.

    YAML 1.1 also reads 1:30 as ninety, 010 as eight and 2026-01-01 as a date. Here numbers are decimal, and everything
    else is text.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if self.check_event(yaml.AliasEvent):  # a few nested references expand to more than any memory holds
            raise self._refusal("references (*name) are not allowed in a recipe", event)
        if getattr(event, "tag", None) not in (None, "!"):  # some constructors raise exceptions other than YAMLError
            raise self._refusal("tags (!name) are not allowed in a recipe", event)
        if self.depth == _MOST_LEVELS:
            raise self._refusal(_TOO_DEEP, event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level == _MOST_LEVELS:  # here, because the scanner would read all brackets first
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
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
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


# ----------------------------------------------------------------------------------------------------
# Files, overrides and keys.


@dataclass(frozen=True)
class Loaded:
    name: str
    recipe: Recipe
    notes: list[str] = field(default_factory=list)  # a line for each alias and each replaced stop condition


# Shipped recipes under their older names, which commands, scripts and the locks of earlier runs still contain.
OLDER_NAMES = {"speedrun-350m": "speedrun-50m"}


def shipped() -> dict[str, Path]:
    """Return the recipes that ship with redline, by name."""
    folder = Path(str(resources.files("redline") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def current_name(name: str) -> str:
    """Return the present name of a shipped recipe that is given by an older one, or else the same name."""
    return OLDER_NAMES.get(name, name)


def find_recipe(name: str) -> Path:
    """Return the file of a recipe that is given by name or by path. A file here hides a shipped recipe."""
    path = Path(name)
    known = shipped()
    try:
        is_file = path.is_file()
    except OSError:  # a name too long for any file, or a folder without permission
        is_file = False
    if current_name(name) in known and not is_file:
        return known[current_name(name)]
    if is_file:
        return path
    if path.suffix in {".yaml", ".yml"} or "/" in name:
        raise UsageError(f"there is no recipe file {name!r}.", fix="`redline recipes` lists the shipped ones.")
    if name in known_keys(Recipe):
        raise UsageError(f"{name!r} is a key, not a recipe.", fix=f"Write it with a value: {name}=VALUE.")
    hint = did_you_mean(name, known) or f"Shipped: {', '.join(known)}."
    raise UsageError(f"there is no recipe {name!r}.", fix=f"{hint} A path to a YAML file works too.")


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML; `where` names its origin in errors."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # _Loader derives from SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}" if error.problem_mark else "file"
        raise RecipeError(where, [Problem(line, f"{error.problem}.", "Correct the YAML there.")]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(where, [Problem("file", f"not YAML: {error}.")]) from None


def read_recipe(path: Path, begin: str = "objective: causal_lm") -> dict[str, Any]:
    """Read a YAML file of sections. `begin` is an example of a first line, for the error of an empty file."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        text = content.decode("utf-8") if len(content) <= _LARGEST_FILE else ""
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [Problem("file", f"cannot be read: {error}.")]) from None
    if len(content) > _LARGEST_FILE:
        what = f"is larger than {_LARGEST_FILE >> 10} KiB, so it is probably not a recipe."
        raise RecipeError(str(path), [Problem("file", what, "To train on a file, use data.source=FILE.")])
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        what = "is empty." if tree is None else f"holds a {type(tree).__name__}, not sections of keys."
        raise RecipeError(str(path), [Problem("file", what, f"Begin with `{begin}`.")])
    return tree


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Parse key=value words (a leading + is ignored) into flat keys and YAML values."""
    flat: dict[str, Any] = {}
    problems = []
    for item in overrides:
        key, separator, text = item.removeprefix("+").partition("=")
        if not separator or not key:
            problems.append(Problem(item, "is not key=value.", "Use, for example, train.steps=100."))
            continue
        flat[key] = _parse_value(text)
    if problems:
        raise RecipeError("command line", problems)
    return dict(flatten(flat))


def _parse_value(text: str) -> Any:
    try:
        value = parse_yaml(text, "override") if text else ""
    except RecipeError:
        return text  # text with YAML punctuation in it, such as a prompt
    return text if value == text.strip() else value  # YAML would drop a space at the end of a prompt


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf of nested sections."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nest(flat: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Turn dotted keys into nested sections, and report keys that are both a section and a value."""
    tree: dict[str, Any] = {}
    problems = []
    for key, value in flat.items():
        *sections, last = key.split(".")
        if len(sections) >= _MOST_LEVELS:
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
    """Yield the dotted names of all keys of a schema."""
    for name, info in schema.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from known_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def key_hint(key: str, keys: Sequence[str], sections: Sequence[str]) -> str:
    """Suggest which of the `keys` was probably meant: the same word in another section, or a similar key."""
    same_word = [k for k in keys if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if same_word:
        return f"Did you mean {same_word[0]!r}?"
    section, dot, word = key.rpartition(".")
    siblings = [k.removeprefix(f"{section}.") for k in [*keys, *ALIASES] if dot and k.startswith(f"{section}.")]
    if siblings:
        canonical = [name for name in siblings if f"{section}.{name}" not in ALIASES]
        return did_you_mean(word, siblings, prefix=f"{section}.") or f"Keys in {section}: {', '.join(canonical)}."
    return did_you_mean(key, [*keys, *ALIASES, *sections]) or f"Top-level keys: {', '.join(sections)}."


def _problem(error: Any, schema: type[BaseModel], *, hint: bool) -> Problem:
    """Convert an error of pydantic."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        fix = key_hint(key, list(known_keys(schema)), list(schema.model_fields)) if hint else ""
        return Problem(key, "is not a key redline knows.", fix)
    if error["type"] in ("model_type", "model_attributes_type"):
        return Problem(key, f"is a section of keys, not {error['input']!r}.", f"Set a key in it: {key}.KEY=VALUE.")
    return Problem(key, str(error.get("ctx", {}).get("error") or error["msg"]))


_ONLY_MUON = ("train.cautious", "train.muon_momentum_warmup", "train.muon_steps")


def load(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe by name or path, apply the overrides and validate it.

    A typed train.steps, train.tokens or train.epochs replaces all three of the recipe.
    """
    path = find_recipe(name)
    base, notes, problems = canonical_keys(dict(flatten(read_recipe(path))), "file")
    extra, more_notes, more = canonical_keys(parse_overrides(overrides), "command line")
    base, replaced = replace_stop_conditions(base, extra)
    objective = extra.get("objective", base.get("objective"))
    base, other_base = _without_model_of_file(base, extra)
    if "data.source" in extra and extra["data.source"] != base.get("data.source") and path in shipped().values():
        # The prompt of a shipped recipe suits its own data ("def " for Python). With other data, samples start like a
        # held-out document instead.
        base |= {"eval.prompt": None} if base.get("eval.prompt") else {}
    if path in shipped().values() and "train.optimizer" in extra and extra["train.optimizer"] not in MUON:
        # `redline train quickstart train.optimizer=adamw` would otherwise complain of a key that nobody typed.
        base = {key: value for key, value in base.items() if key not in _ONLY_MUON}
    keys = _apply_preset(_without_replaced(base, extra), extra)
    defaults = job(str(objective)).defaults(keys) if is_job(objective) else {}
    tree, clashes = nest({**defaults, **keys})
    recipe = validate(tree, where=name, problems=[*problems, *more, *clashes], written=True)
    is_renamed = path.stem != name and path == shipped().get(current_name(name))
    renamed = [f"{name} is the older name of the recipe {path.stem}"] if is_renamed else []
    return Loaded(path.stem, recipe, [*renamed, *notes, *more_notes, *replaced, *other_base])


def _without_model_of_file(base: dict[str, Any], extra: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of the file without those that describe its model, if the command line names another base.

    Otherwise `redline train pretrain-350m model.base=OTHER` would answer with problems that the user did not write.
    Also return a note that names the keys.
    """
    given = extra.get("model.base")
    if given is None or given == base.get("model.base"):
        return base, []
    dropped = [key for key in base if any(key == one or key.startswith(f"{one}.") for one in _KEYS_OF_MODEL)]
    kept = {key: value for key, value in base.items() if key not in dropped}
    named = list(dict.fromkeys(".".join(key.split(".")[:2]) for key in dropped if key not in extra))
    note = f"model.base={given} replaces the recipe's own {', '.join(named)}"
    return kept, [note] if named else []


def _without_replaced(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the file without the sections that an override sets to a value, and the other way round."""

    def is_replaced(key: str) -> bool:
        return any(key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in overrides)

    return {key: value for key, value in base.items() if not is_replaced(key)}


def validate(tree: dict[str, Any], *, where: str, problems: Sequence[Problem] = (), written: bool = False) -> Recipe:
    """Return the recipe, or raise a RecipeError with `problems` and everything that is wrong with `tree`.

    `written` is whether a person wrote the recipe. A lock, in which a plan has filled in values, is not checked for
    keys without effect.
    """
    schema = recipe_class(tree.get("objective", "causal_lm"))
    try:
        recipe = schema.model_validate(tree)
    except ValidationError as error:
        errors = (_problem(e, schema, hint=n < _MOST_HINTS) for n, e in enumerate(error.errors()))
        raise RecipeError(where, [*problems, *errors]) from None
    problems = [*problems, *_contradictions(recipe), *(_keys_without_effect(recipe) if written else ())]
    if problems:
        raise RecipeError(where, problems)
    return recipe


# ----------------------------------------------------------------------------------------------------
# Contradictions between keys, which the type of a single key cannot catch.


_NOT_FOR_A_BASE = "does nothing with model.base: the base has no such part."
_MOST_LAYERS = 10_000  # plans and models loop over the layers
# Larger widths would overflow the 64-bit integers that sizes are computed in. d_ff is derived from d_model.
_LARGEST_WIDTHS = {**dict.fromkeys(("d_model", "heads", "kv_heads", "head_dim", "vocab"), 1 << 40), "d_ff": 1 << 42}


def _contradictions(recipe: Recipe) -> list[Problem]:
    """Return the combinations of keys that cannot be meant."""
    return [
        *_model_problems(recipe.model),
        *_stop_problems(recipe.train),
        *_batch_problems(recipe.train),
        *_stream_problems(recipe),
        *_address_problems(recipe),
        *_overlong_problems(recipe),
        *_optimizer_problems(recipe),
        *_schedule_problems(recipe.train),
        *_job_problems(recipe),
    ]


def _job_problems(recipe: Recipe) -> list[Problem]:
    found: list[Problem] = job(recipe.objective).problems(recipe)
    return found or _context_problems(recipe)  # which needs a valid layout


def _keys_without_effect(recipe: Recipe) -> list[Problem]:
    """Return the keys that a person set to no effect.

    Locks are not checked for them: a lock also contains what the plan filled in, and older versions allowed such keys.
    """
    return [
        *_unused_size(recipe.model),
        *_unused_beside_base(recipe.model),
        *_unused_stream(recipe),
        *_unused_compile_mode(recipe.train),
        *_unused_ring(recipe),
        *_unused_sharding(recipe.parallel),
    ]


def _unused_sharding(parallel: Parallel) -> list[Problem]:
    users = {"shard_size": ("hsdp",), "accumulate": SHARDED}
    return [
        Problem(
            f"parallel.{key}", f"does nothing with parallel.mode={parallel.mode}.", f"Remove it, or use {modes[-1]}."
        )
        for key, modes in users.items()
        if getattr(parallel, key) != AUTO and parallel.mode not in (AUTO, *modes)
    ]


def _unused_ring(recipe: Recipe) -> list[Problem]:
    if recipe.parallel.context > 1 or recipe.parallel.context_backend == "gather":
        return []
    fix = "Remove it, or set parallel.context."
    return [Problem("parallel.context_backend", "does nothing with parallel.context=1.", fix)]


def _unused_compile_mode(train: Train) -> list[Problem]:
    if train.compile is not False or train.compile_mode == "default":
        return []
    fix = "Remove it, or use train.compile=true."
    return [Problem("train.compile_mode", "does nothing while train.compile=false.", fix)]


def _unused_stream(recipe: Recipe) -> list[Problem]:
    if not recipe.data.stream or job(recipe.objective).reads_stream:
        return []
    what = f"is for text: objective={recipe.objective} reads all of its rows before it starts."
    return [Problem("data.stream", what, "Remove it, or set data.stream=false.")]


def _unused_beside_base(model: Model) -> list[Problem]:
    if model.base is None:
        return []
    defaults = Model()
    keys = [key for key in ("softcap", "init", "embedding_std") if getattr(model, key) != getattr(defaults, key)]
    return [Problem(f"model.{key}", _NOT_FOR_A_BASE, "Remove it.") for key in keys]


def _unused_size(model: Model) -> list[Problem]:
    """Refuse model.size beside a complete shape of other numbers."""
    of_size = dict(zip(("layers", "d_model", "heads", "d_ff"), SIZES.get(model.size or "", ()), strict=False))
    stated = {key: getattr(model, key) for key in of_size}
    if AUTO in stated.values() or stated == of_size:
        return []
    numbers = ", ".join(f"{key} {value}" for key, value in stated.items())
    fix = f"Add {' '.join(f'model.{key}=auto' for key in of_size)}, or remove the size."
    return [Problem("model.size", f"{model.size} does nothing: the recipe states {numbers}.", fix)]


def row_copies(recipe: Recipe) -> tuple[int, ...]:
    """Return the lengths of the copies of a sequence that the model reads side by side: in block diffusion two."""
    layout = job(recipe.objective).layout(recipe)
    if layout is None:
        return (recipe.data.seq_len,)
    return tuple(length for length in (len(layout.noisy), len(layout.clean)) if length)


def _context_problems(recipe: Recipe) -> list[Problem]:
    """Report sequences that cannot be split over ranks, and masks that torch's ring does not have."""
    size = recipe.parallel.context
    if size == 1:
        return []
    whole = job(recipe.objective).whole_sequences
    problem = indivisible_sequence(size, () if whole else row_copies(recipe), whole)
    found = [] if problem is None else [problem]
    masked = recipe.data.pack or job(recipe.objective).layout(recipe) is not None
    if recipe.parallel.context_backend != "ring" or not masked:
        return found
    what = "ring has no mask but a causal one: it cannot keep packed documents or diffusion's blocks apart."
    return [*found, Problem("parallel.context_backend", what, "Use parallel.context_backend=gather.")]


def _overlong_problems(recipe: Recipe) -> list[Problem]:
    key = job(recipe.objective).overlong_key
    if recipe.data.overlong is None or key == "data.overlong":
        return []
    fix = f"Use {key}." if key else "Remove it."
    return [Problem("data.overlong", f"does nothing with objective={recipe.objective}.", fix)]


def _address_problems(recipe: Recipe) -> list[Problem]:
    """Refuse addresses such as https://…, without quoting them: they may contain a password.

    The schema checks those of data.source and checkpoint.mirror, which may be URLs.
    """
    data, model = recipe.data, recipe.model
    places = {"data.source": " ".join(part.source for part in data.parts), "data.tokenizer": data.tokenizer}
    places |= {"model.base": model.base or "", "model.init_from": model.init_from or ""}
    what = "is an address; redline opens files, folders, hub ids and hf://OWNER/NAME[@REVISION]."
    problems = []
    for key, place in places.items():
        addresses = [word for word in place.split() if "://" in word]
        if key in ("data.source", "model.init_from"):
            addresses = [word for word in addresses if not is_url(word)]  # other URLs may be opened
        if any(key == "data.tokenizer" or parse_address(word) is None for word in addresses):
            problems.append(Problem(key, what, "Download it, and use the path."))
    if is_url(origin := model.init_from or "") and (problem := url_problem(origin, MIRROR_SCHEMES)):
        problems.append(Problem("model.init_from", problem, "Only the mirror of a run is opened by its address."))
    return problems


def _model_problems(model: Model) -> list[Problem]:
    problems = []
    of_size = dict(zip(("layers", "d_model", "heads", "d_ff"), SIZES.get(model.size or "", ()), strict=False))
    d_model, heads = (
        none_if_auto(model.d_model) or of_size.get("d_model"),
        none_if_auto(model.heads) or of_size.get("heads"),
    )
    kv_heads, head_dim = none_if_auto(model.kv_heads), none_if_auto(model.head_dim)
    if model.size is None and model.base is None:
        missing = [k for k in ("layers", "d_model", "heads") if getattr(model, k) == AUTO]
        problems += [Problem(f"model.{key}", "is missing.", "Set it, or use model.size=auto.") for key in missing]
    if model.size == AUTO and not heads and (d_model or kv_heads):
        key = "model.d_model" if d_model else "model.kv_heads"
        problems.append(Problem("model.heads", f"is missing beside {key}.", "Set both, or leave both to model.size."))
    if model.size == AUTO and heads and not d_model:
        fix = "Set both, or leave both to model.size."
        problems.append(Problem("model.d_model", "is missing beside model.heads.", fix))
    if d_model and heads and not head_dim and d_model % heads:
        fix = "Use a divisor, or set model.head_dim."
        problems.append(Problem("model.heads", f"{heads} does not divide model.d_model={d_model}.", fix))
    elif (width := head_dim or (d_model // heads if d_model and heads else 0)) % 2:
        what = f"{width} is odd; rotary embeddings rotate pairs of values."
        problems.append(Problem("model.head_dim", what, "Use an even number."))
    layers = none_if_auto(model.layers) or of_size.get("layers") or min(size[0] for size in SIZES.values())
    if model.base is not None:
        parts = {"model.value_embeddings": model.value_embeddings > 0, "model.skips": model.skips != "none"}
        problems += [Problem(key, _NOT_FOR_A_BASE, "Remove it.") for key, on in parts.items() if on]
    if layers > _MOST_LAYERS:
        problems.append(Problem("model.layers", f"{layers:,} are too many.", f"Use at most {_MOST_LAYERS:,}."))
    too_large = {key: most for key, most in _LARGEST_WIDTHS.items() if (none_if_auto(getattr(model, key)) or 0) > most}
    problems += [Problem(f"model.{key}", "is too large.", f"Use at most {most:,}.") for key, most in too_large.items()]
    if model.skips != "none" and none_if_auto(model.layers) == 1:
        fix = "Remove it, or use more model.layers."
        problems.append(Problem("model.skips", f"{model.skips} does nothing in a model of one layer.", fix))
    if 2 * model.value_embeddings > layers:
        what = f"{model.value_embeddings} is more than half of {layers} layers: each table serves two of them."
        problems.append(Problem("model.value_embeddings", what, f"Use at most {layers // 2}, or more model.layers."))
    if heads and kv_heads and heads % kv_heads:
        problems.append(Problem("model.kv_heads", f"{kv_heads} does not divide model.heads={heads}.", "Use a divisor."))
    return problems


def _stop_problems(train: Train) -> list[Problem]:
    if train.steps or train.tokens or train.epochs or train.hours:
        return []
    what = "no key sets the length of the run, which the learning rate schedule needs."
    fix = "Set train.steps, train.tokens, train.epochs or train.hours."
    return [Problem("train.steps", what, fix)]


def _batch_problems(train: Train) -> list[Problem]:
    stated = (none_if_auto(train.global_batch), none_if_auto(train.micro_batch), none_if_auto(train.accumulation))
    total, micro, accumulation = stated
    if total and micro and accumulation and total % (micro * accumulation) == 0:
        return []  # correct for some number of GPUs, which the plan checks
    batch = solve_batch(*stated)
    return [batch] if isinstance(batch, Problem) else []


def _optimizer_problems(recipe: Recipe) -> list[Problem]:
    """Report optimizer keys that the chosen optimizer does not read."""
    train, problems = recipe.train, []
    fix = "Remove it, or use train.optimizer=muon or normuon."
    if train.optimizer not in MUON:
        unused = {"train.cautious": train.cautious, "train.muon_momentum_warmup": train.muon_momentum_warmup}
        unused["train.muon_steps"] = train.muon_steps != type(train).model_fields["muon_steps"].default
        what = f"does nothing with train.optimizer={train.optimizer}."
        problems += [Problem(key, what, fix) for key, value in unused.items() if value]
    elif train.cautious and not train.weight_decay:
        fix = "Remove it, or set train.weight_decay."
        problems.append(Problem("train.cautious", "changes weight decay, but train.weight_decay is 0.", fix))
    # Whether the head of a base is tied to its embedding is known only when the base is read.
    if (
        recipe.model.base is None
        and recipe.model.tied
        and none_if_auto(train.head_lr) not in (None, train.embedding_lr)
    ):
        fix = "Use train.embedding_lr, or model.tied=false."
        problems.append(Problem("train.head_lr", "does nothing while model.tied=true: the head is the embedding.", fix))
    return problems


def _schedule_problems(train: Train) -> list[Problem]:
    """Report keys of one_cycle that another schedule does not read, and two rules for one momentum."""
    if train.schedule != ONE_CYCLE:
        unused = {"train.pct_start": train.pct_start, "train.cycle_momentum": train.cycle_momentum}
        what = f"does nothing with train.schedule={train.schedule}."
        fix = f"Remove it, or use train.schedule={ONE_CYCLE}."
        return [Problem(key, what, fix) for key, value in unused.items() if value is not None]
    if train.cycle_momentum is not None and train.muon_momentum_warmup:
        what = "and train.muon_momentum_warmup both set Muon's momentum."
        return [Problem("train.cycle_momentum", what, "Remove one of them.")]
    return []


def _stream_problems(recipe: Recipe) -> list[Problem]:
    if not recipe.data.stream or not job(recipe.objective).reads_stream:
        return []
    problems = []
    if recipe.train.epochs:
        fix = "Set train.epochs=null, and train.steps, train.tokens or train.hours instead."
        problems.append(
            Problem("data.stream", "the length of an epoch is not known before the whole stream is read.", fix)
        )
    if len(recipe.data.parts) > 1:
        fix = "Prepare the mixture first (data.stream=false), or stream one source."
        problems.append(Problem("data.stream", "works with one source, not with a mixture.", fix))
    elif recipe.data.parts[0].repeat is not None:
        fix = "Remove repeat: a stream is read again from its beginning until the run ends."
        problems.append(Problem("data.stream", "has no epochs, so a source cannot be repeated in one.", fix))
    return problems
