"""Explain recipe keys: meaning, type, default, aliases and the shipped recipes that set them.

The texts are in keys.toml. The keys of a job from another package are described by their pydantic fields instead.
`redline keys` prints what this module returns, and scripts/docs.py writes it into the docs.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pydantic import BaseModel

from redline.errors import RecipeError, UsageError
from redline.jobs.base import job_names, options_of
from redline.recipe.aliases import ALIASES, canonical_keys
from redline.recipe.load import flatten, key_hint, known_keys, parse_yaml, read_recipe, shipped
from redline.recipe.schema import RESUMABLE, Recipe, recipe_class


@dataclass(frozen=True)
class Key:
    """What there is to know about a key. Texts may contain Markdown code marks and links."""

    name: str
    type: str
    default: str  # as YAML
    text: str
    auto: str | None  # what `auto` becomes
    aliases: tuple[str, ...]
    resumable: bool  # may change when a run is resumed

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def word(self) -> str:
        return self.name.rpartition(".")[2]


@cache
def _texts() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((resources.files("redline.recipe") / "keys.toml").read_text("utf-8"))
    return found


@cache
def key_texts() -> dict[str, str]:
    """Return what each key of redline's own jobs means, in the order of the docs."""
    return dict(flatten({name: part for name, part in _texts().items() if name not in ("sections", "auto")}))


def auto_texts() -> dict[str, str]:
    """Return what `auto` becomes, by key."""
    found: dict[str, str] = _texts()["auto"]
    return found


def sections() -> dict[str, str]:
    """Return a line about each section, with those of the jobs of other packages; "" is the top level."""
    found: dict[str, str] = dict(_texts()["sections"])
    others = [name for name in job_names() if name not in found and list(known_keys(options_of(name)))]
    return found | {name: f"options of `objective: {name}`" for name in others}


def keys_in(section: str) -> list[Key]:
    """Return the keys of a section, which must be one of `sections()`, without those of sections inside it."""
    schema = _schema_of(section)
    order = {key: number for number, key in enumerate(key_texts())}
    names = [name for name in known_keys(schema) if name.rpartition(".")[0] == section]
    names.sort(key=lambda name: order.get(name, len(order)))
    tree = schema.model_json_schema()
    return [_key(name, schema, tree) for name in names]


def explain(name: str) -> Key:
    """Return what there is to know about a key or an alias. Raise a UsageError for a name that is no key."""
    key = ALIASES.get(name, name)
    schema = _schema_of(key)
    if key not in known_keys(schema):
        what = f"redline has no key {name!r}."
        sections_ = [*Recipe.model_fields, *(part for part in job_names() if part in sections())]
        raise UsageError(what, fix=key_hint(name, every_key(), sections_))
    return _key(key, schema, schema.model_json_schema())


def every_key() -> list[str]:
    """Return the names of all keys, with the options of every job."""
    own = [f"{job}.{key}" for job in job_names() for key in known_keys(options_of(job))]
    return [*known_keys(Recipe), *own]


def keys_by_section() -> dict[str, list[str]]:
    """Return the names of all keys by their section, in the order of `sections()`."""
    found: dict[str, list[str]] = {section: [] for section in sections()}
    for key in every_key():
        found[key.rpartition(".")[0]].append(key)
    return found


def set_by_recipes(key: str) -> dict[str, Any]:
    """Return the shipped recipes that set a key, with the value."""
    words = re.compile("|".join(rf"\b{name.rpartition('.')[2]}\b" for name in (key, *_aliases(key))))
    found: dict[str, Any] = {}
    for name, path in shipped().items():
        if words.search(path.read_text(encoding="utf-8")):  # parsing YAML takes longer than this search
            keys, _, _ = canonical_keys(dict(flatten(read_recipe(path))), "file")
            found |= {name: keys[key]} if key in keys else {}
    return found


def _schema_of(key: str) -> type[Recipe]:
    """Return the schema that has the key: with a job's options if it is one of those."""
    section = key.partition(".")[0]
    is_option = section not in Recipe.model_fields and section in job_names()
    return recipe_class(section if is_option else Recipe.model_fields["objective"].default)


def _aliases(key: str) -> tuple[str, ...]:
    return tuple(alias for alias, name in ALIASES.items() if name == key)


def _key(name: str, schema: type[Recipe], tree: dict[str, Any]) -> Key:
    info = _field(schema, name)
    text = key_texts().get(name) or info.description or ""
    auto = auto_texts().get(name)
    return Key(
        name, kind(field_of(tree, name)), as_yaml(info.default), text, auto, _aliases(name), name.startswith(RESUMABLE)
    )


def _field(schema: type[BaseModel], name: str) -> Any:
    *above, last = name.split(".")
    for part in above:
        inner: Any = schema.model_fields[part].annotation
        schema = inner
    return schema.model_fields[last]


def as_yaml(value: Any) -> str:
    """Return a value as a recipe would write it."""
    if isinstance(value, float) and value and abs(value) < 1e-2:
        digits, _, exponent = f"{value:e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_yaml(item) for item in value)}]"
    if isinstance(value, str) and not value.startswith(("{", "[")):
        try:
            if value and parse_yaml(value, "default") == value:
                return value
        except RecipeError:  # a text that YAML cannot read without quotes
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


# ----------------------------------------------------------------------------------------------------
# Types in words, from the JSON schema.


def section_of(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the JSON schema of a section; add one that occurs only in aliases."""
    section = schema
    for part in name.split(".") if name else ():
        new: dict[str, Any] = {"type": "object", "properties": {}, "deprecated": True}
        child = section["properties"].setdefault(part, new)
        section = schema["$defs"][child["$ref"].rpartition("/")[2]] if "$ref" in child else child
    return section


def field_of(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the JSON schema of a key."""
    section, _, name = key.rpartition(".")
    field: dict[str, Any] = section_of(schema, section)["properties"][name]
    return field


def kind(field: dict[str, Any]) -> str:
    """Return a field's type in words."""
    if "enum" in field:
        words = [json.dumps(word) if isinstance(word, bool) else word for word in field["enum"]]
        return ", ".join(f"`{word}`" for word in words)
    if "const" in field:
        return f"`{field['const']}`"
    if "anyOf" in field:
        forms = [kind(form) for form in field["anyOf"] if "pattern" not in form]
        return " or ".join(dict.fromkeys(forms))
    kinds = {"integer": "whole number", "number": "number", "boolean": "`true`, `false`", "string": "text"}
    if field["type"] == "array":
        if field.get("maxItems") == 2:
            return "two numbers"
        items = field.get("items", {})
        return f"a list of {kind(items)}" if "enum" in items else "a list"
    return {**kinds, "null": "`null`", "object": "a mapping"}[field["type"]] + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    return " and".join(f" {sign} {field[name]:g}" for name, sign in signs.items() if name in field)


def plain(text: str) -> str:
    """Return the text without Markdown's links and code marks."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "")
