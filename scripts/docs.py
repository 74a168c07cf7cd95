"""Write docs/recipe.md and docs/recipe.schema.json from the schema: python scripts/docs.py [--check]

What a key means is said once, in docs/keys.md, and what `auto` becomes in docs/recipes.md; types, bounds, defaults and
other spellings come from the code. `--check` writes nothing and exits 1 when a file is not what would be written.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

try:
    from redline.jobs.base import JOBS, options_of
    from redline.planning.shapes import TARGETS
    from redline.recipe.aliases import ALIASES
    from redline.recipe.load import known_keys
    from redline.recipe.schema import RESUMABLE, Recipe, recipe_class
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed here: run `make setup`, then .venv/bin/python scripts/docs.py")

DOCS = ROOT / "docs"
READERS = {  # section → the verbs that look at it; those after the run read the lock
    "": "train, plan, recipes",
    "model": "train, plan; eval, sample and export, from the run's lock",
    "data": "train, plan, eval; sample and export for the tokenizer",
    "train": "train, plan",
    "eval": "train; eval for `sequences`",
    "checkpoint": "train",
    "monitor": "train, plan for the price",
    "parallel": "train, plan",
    "model.lora": "train, plan, eval, sample and export, with `objective: finetune`",
    "finetune": "train, plan, eval, sample and export, with `objective: finetune`",
    "latent_prefix": "train, plan, eval and sample, with `objective: latent_prefix`",
    "block_diffusion": "train, plan, eval and sample, with `objective: block_diffusion`",
    "hierarchical_diffusion": "train, plan, eval and sample, with `objective: hierarchical_diffusion`",
}
# pydantic sees what a list of sources becomes, not that a plain name in it is enough
_SOURCE = {
    "type": "object",
    "properties": {"source": {"type": "string"}, "weight": {"type": "number"}, "repeat": {"type": "number"}},
}
BETTER = {
    "latent_prefix.others": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}},
    "model.lora.target_modules": {
        "anyOf": [{"enum": ["all-linear"]}, {"type": "array", "minItems": 1, "items": {"enum": list(TARGETS)}}]
    },
    "data.source": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _SOURCE]}},
        ]
    },
}


def cells(page: str, heading: str) -> list[list[str]]:
    """The rows of the table under the line that begins with `heading`."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(heading))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def meanings() -> dict[str, tuple[str, str]]:
    """key → default and text, as docs/keys.md has them."""
    return {code(key)[0]: (default, " | ".join(text)) for key, default, *text in cells("keys.md", "| key |")}


def automatic() -> dict[str, str]:
    """key → what `auto` becomes, as docs/recipes.md has it."""
    found: dict[str, str] = {}
    for names, text in cells("recipes.md", "| key |"):
        section = code(names)[0].split(".")[0]
        found |= {name if "." in name else f"{section}.{name}": text for name in code(names)}
    return found


def spellings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for alias, key in ALIASES.items():
        found.setdefault(key, []).append(alias)
    return found


# --- the JSON schema


def json_schema() -> dict[str, Any]:
    """What an editor needs: types, bounds, texts, of every job; other spellings are there too, struck through."""
    schema: dict[str, Any] = {}
    for job in JOBS:
        found = _without_titles(recipe_class(job).model_json_schema())
        found["$defs"] = {f"{job}.Options" if name == "Options" else name: d for name, d in found["$defs"].items()}
        found["properties"][job]["$ref"] = f"#/$defs/{job}.Options"
        for part in ("$defs", "properties"):
            found[part] = {**schema.get(part, {}), **found[part]}
        schema = {**schema, **found}
    for key, (_, text) in meanings().items():
        field = _place(schema, key)
        field.update(BETTER.get(key, {}))
        field["description"] = _plain(text)
    for alias, key in ALIASES.items():
        section, _, last = alias.rpartition(".")
        where = _section(schema, section) if section else schema
        where["properties"][last] = {"description": f"Another spelling of {key}.", "deprecated": True}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A redline recipe",
        "description": "Generated by scripts/docs.py. In a recipe: # yaml-language-server: $schema=PATH_TO_THIS_FILE",
        **schema,
    }


def _without_titles(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: _without_titles(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}
    return [_without_titles(item) for item in node] if isinstance(node, list) else node


def _section(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The object behind a section's name; a section that only other spellings know is made."""
    where = schema
    for part in name.split("."):
        made: dict[str, Any] = {"type": "object", "properties": {}, "deprecated": True}
        found = where["properties"].setdefault(part, made)
        where = schema["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
    return where


def _place(schema: dict[str, Any], key: str) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    place: dict[str, Any] = (_section(schema, section) if section else schema)["properties"][name]
    return place


def _plain(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "")


# --- the page


def kind(field: dict[str, Any]) -> str:
    """A field's type in words."""
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
        if "enum" in field.get("items", {}):
            return f"a list of {kind(field['items'])}"
        of = "sources" if "source" in json.dumps(field) else "models"
        return "two numbers" if field.get("maxItems") == 2 else f"a list of {of}"
    return {**kinds, "null": "`null`", "object": "a mapping"}[field["type"]] + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    return " and".join(f" {sign} {field[name]:g}" for name, sign in signs.items() if name in field)


def page() -> str:
    schema, texts, auto, also = json_schema(), meanings(), automatic(), spellings()
    own = {f"{job}.{key}" for job in JOBS for key in known_keys(options_of(job))}
    missing = ({*known_keys(Recipe)} | own) ^ set(texts)
    if missing:
        raise SystemExit(f"docs/keys.md and the schema differ in {', '.join(sorted(missing))}")
    lines = [*INTRODUCTION]
    for section in dict.fromkeys(key.rpartition(".")[0] for key in texts):
        lines += ["", f"## {section or 'Top level'}", f"Read by: {READERS[section]}.", "", *HEADER]
        for key, (default, text) in texts.items():
            if key.rpartition(".")[0] != section:
                continue
            resumed = " ↻" if key.startswith(RESUMABLE) else ""
            notes = [text, *([f"`auto`: {auto[key]}"] if key in auto else [])]
            notes += [f"also spelt {', '.join(f'`{a}`' for a in also[key])}"] if key in also else []
            lines.append(f"| `{key}`{resumed} | {kind(_place(schema, key))} | {default} | {'. '.join(notes)} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
# Recipe reference

Generated by `python scripts/docs.py` from the schema, [keys.md](keys.md) and [recipes.md](recipes.md); do not edit.
Whole numbers may be written `512k` or `2.5B`, hours `90m` or `1.5h`. ↻ marks what may change on `--resume`.

The same as JSON schema is [recipe.schema.json](recipe.schema.json): with the YAML language server, this first line of a
recipe makes an editor complete keys, show these texts and mark mistakes.

```yaml
# yaml-language-server: $schema=../docs/recipe.schema.json
```""".splitlines()
HEADER = ["| key | type | default | is |", "|---|---|---|---|"]


def written() -> dict[Path, str]:
    schema = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    return {DOCS / "recipe.md": page(), DOCS / "recipe.schema.json": schema}


def main() -> int:
    stale = [path for path, text in written().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the schema says. Run `python scripts/docs.py`.")
        return 1 if stale else 0
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(stale)} of {len(written())} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
