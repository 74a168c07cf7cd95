"""Generate docs/recipe.md and docs/recipe.schema.json: python scripts/docs.py [--check]

The meaning of each key comes from docs/keys.md and what `auto` becomes from docs/recipes.md; types, bounds, defaults
and other spellings come from the code. `--check` writes nothing and exits with 1 if a file is out of date.
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
READERS = {  # section → the verbs that read it; eval, sample and export read the run's lock
    "": "train, plan, recipes",
    "model": "train, plan; eval, sample and export, from the run's lock",
    "data": "train, plan, eval; sample and export for the tokenizer",
    "train": "train, plan",
    "eval": "train; eval for `sequences`",
    "checkpoint": "train",
    "monitor": "train, plan for the price",
    "parallel": "train, plan",
    "model.lora": "train, plan, eval, sample and export, where adapters are trained",
    "causal_lm": "train, plan, eval, sample and export, with `objective: causal_lm`",
    "finetune": "train, plan, eval, sample and export, with `objective: finetune`",
    "latent_prefix": "train, plan, eval and sample, with `objective: latent_prefix`",
    "block_diffusion": "train, plan, eval and sample, with `objective: block_diffusion`",
    "hierarchical_diffusion": "train, plan, eval and sample, with `objective: hierarchical_diffusion`",
}
# The JSON schema of a list of sources. Pydantic's own describes what validation returns and lacks the plain name.
_SOURCE = {
    "type": "object",
    "properties": {"source": {"type": "string"}, "weight": {"type": "number"}, "repeat": {"type": "number"}},
}
# Fields that pydantic describes by what validation returns, described by what a user may write.
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


def table_rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of each row of the table whose first line begins with `heading`."""
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
    """Return the default and the text of each key, from docs/keys.md."""
    return {code(key)[0]: (default, " | ".join(text)) for key, default, *text in table_rows("keys.md", "| key |")}


def auto_values() -> dict[str, str]:
    """Return what `auto` becomes for each key, from docs/recipes.md."""
    values: dict[str, str] = {}
    for names, text in table_rows("recipes.md", "| key |"):
        section = code(names)[0].split(".")[0]
        values |= {name if "." in name else f"{section}.{name}": text for name in code(names)}
    return values


def aliases_by_key() -> dict[str, list[str]]:
    aliases: dict[str, list[str]] = {}
    for alias, key in ALIASES.items():
        aliases.setdefault(key, []).append(alias)
    return aliases


# --- the JSON schema


def json_schema() -> dict[str, Any]:
    """Return what an editor needs: types, bounds and texts of every job's keys; aliases are marked as deprecated."""
    schema: dict[str, Any] = {}
    for job in JOBS:
        of_job = _without_titles(recipe_class(job).model_json_schema())
        # Most jobs call their options `Options`; merged into one schema they need different names.
        options = of_job["properties"][job]["$ref"].rpartition("/")[2]
        of_job["$defs"] = {f"{job}.Options" if name == options else name: d for name, d in of_job["$defs"].items()}
        of_job["properties"][job]["$ref"] = f"#/$defs/{job}.Options"
        for part in ("$defs", "properties"):
            of_job[part] = {**schema.get(part, {}), **of_job[part]}
        schema = {**schema, **of_job}
    for key, (_, text) in meanings().items():
        field = _field(schema, key)
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
    """Return the schema of a section; one that occurs only in aliases is added."""
    section = schema
    for part in name.split("."):
        new: dict[str, Any] = {"type": "object", "properties": {}, "deprecated": True}
        child = section["properties"].setdefault(part, new)
        section = schema["$defs"][child["$ref"].rpartition("/")[2]] if "$ref" in child else child
    return section


def _field(schema: dict[str, Any], key: str) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    field: dict[str, Any] = (_section(schema, section) if section else schema)["properties"][name]
    return field


def _plain(text: str) -> str:
    """Return the text without Markdown's links and code marks."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "")


# --- the page


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
        if "enum" in field.get("items", {}):
            return f"a list of {kind(field['items'])}"
        of = "sources" if "source" in json.dumps(field) else "models"
        return "two numbers" if field.get("maxItems") == 2 else f"a list of {of}"
    return {**kinds, "null": "`null`", "object": "a mapping"}[field["type"]] + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    return " and".join(f" {sign} {field[name]:g}" for name, sign in signs.items() if name in field)


def page() -> str:
    schema, texts, auto, aliases = json_schema(), meanings(), auto_values(), aliases_by_key()
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
            mark = " ↻" if key.startswith(RESUMABLE) else ""
            notes = [text, *([f"`auto`: {auto[key]}"] if key in auto else [])]
            notes += [f"also spelt {', '.join(f'`{a}`' for a in aliases[key])}"] if key in aliases else []
            lines.append(f"| `{key}`{mark} | {kind(_field(schema, key))} | {default} | {'. '.join(notes)} |")
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


def generated_files() -> dict[Path, str]:
    schema = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    return {DOCS / "recipe.md": page(), DOCS / "recipe.schema.json": schema}


def main() -> int:
    files = generated_files()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date. Run `python scripts/docs.py`.")
        return 1 if stale else 0
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(stale)} of {len(files)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
