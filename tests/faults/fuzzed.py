"""Random recipes from the schema: valid and odd values for every key, and pitfalls of YAML."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from redline.jobs.base import JOBS
from redline.recipe.aliases import ALIASES
from redline.recipe.schema import recipe_class

SHAPE = {"model.layers": 4, "model.d_model": 128, "model.heads": 4}
VALID = {  # a recipe of each job that loads
    "causal_lm": SHAPE,
    "finetune": {**SHAPE, "model.base": "./base"},
    "latent_prefix": {**SHAPE, "model.base": "./base"},
    "block_diffusion": {**SHAPE, "data.seq_len": 64},
    "hierarchical_diffusion": SHAPE,
}
WRONG: list[Any] = [[[1]]]  # a type that no key accepts
ODD: list[Any] = [
    *(None, True, False, 0, -1, 3, 10**30, -(10**400), 0.5, 1e308, float("nan"), float("inf"), 1e-320, 2**63),
    *("", " ", "1e-4", "1e400", "nan", "auto", "0x10", "010", "1:30", "90m", "2k", "-3", "1,000", "9" * 330, "yes"),
    *("é", "日本", "\U0001f600", "\u202e", "\ud800", "\x00", "\x7f", "x" * 5000, "../../etc", "{{ 7 * 7 }}", "~"),
    *([], {}, [1, 2], [None], [[1]], [{}], {"a": 1}, {"a": {"b": [1]}}, [0.9, 0.95], ["q_proj"], {"rope_type": "yarn"}),
    *([{"source": "a", "weight": 0}], [{"source": "a"}, {"source": "a"}], [{"source": []}], {"": ""}, {".": "."}),
]
TEXTS = ["a", "./corpus", "日本語", "two words", "train:300", "gpt2", "1e-4", "true", "null", "#", "\ud800"]


def leaves(node: dict[str, Any], defined: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each key of a JSON schema with the schema of its value."""
    if "$ref" in node:
        node = defined[node["$ref"].rpartition("/")[2]]
    if "properties" in node:
        for name, inner in node["properties"].items():
            yield from leaves(inner, defined, f"{prefix}{name}.")
    else:
        yield prefix[:-1], node


def keys_of(job: str) -> dict[str, dict[str, Any]]:
    schema = recipe_class(job).model_json_schema()
    return dict(leaves(schema, schema["$defs"]))


KEYS = {job: keys_of(job) for job in JOBS}


def accepted(form: dict[str, Any], rng: random.Random) -> Any:
    """Draw a value that the schema accepts."""
    if "anyOf" in form:
        return accepted(rng.choice(form["anyOf"]), rng)
    if "enum" in form or "const" in form:
        return rng.choice(form.get("enum") or [form["const"]])
    kind = form.get("type")
    if kind in ("integer", "number"):
        low = form.get("minimum", form.get("exclusiveMinimum", 0))
        integers = [low + 1, low + 2, 4, 8, 16, 64, 128, 1000, 2**40]
        reals = [low + 1e-9, 1e-4, 0.5, 0.9, form.get("maximum", 3e4)]
        return rng.choice(integers if kind == "integer" else reals)
    if "pattern" in form:
        return rng.choice(["8", "64", "1k", "2M", "1e3"])
    lists = [[0.8, 0.9], ["q_proj", "v_proj"], [{"source": "a", "weight": 2.5}, "b"]]
    ropes = [{"rope_type": "linear", "factor": 2.0}]
    others = {"boolean": [True, False], "null": [None], "string": TEXTS, "array": lists, "object": ropes}
    return rng.choice(others[str(kind)] if kind in others else TEXTS)


def misspell(key: str, rng: random.Random) -> str:
    place = rng.randrange(len(key))
    letter = rng.choice(["", "x", "_", ".", "é", key[place] * 2])
    return key[:place] + letter + key[place + 1 :]


class Fuzz:
    """A random recipe: keys of a file and words of a command line."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.job = self.rng.choice(JOBS)
        self.file: dict[str, Any] = {"objective": self.job, "train.steps": 10, **VALID[self.job]}
        self.words: list[str] = []
        changes = [self.right, self.right, self.right, self.odd, self.unknown, self.foreign, self.alias, self.section]
        mostly_valid = self.rng.random() < 0.5  # half of the recipes should mostly load
        for _ in range(self.rng.randint(0, 4)):
            (self.right if mostly_valid else self.rng.choice(changes))()
        self.trap = None if mostly_valid else self.rng.choice([None, None, *TRAPS])

    def put(self, key: str, value: Any) -> None:
        if self.rng.random() < 0.3:
            text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0]
            self.words.append(f"{key}={text}")
        else:
            self.file[key] = value

    def _any(self, job: str) -> str:
        return self.rng.choice(list(KEYS[job]))

    def right(self) -> None:
        key = self._any(self.job)
        if key != "objective":
            self.put(key, accepted(KEYS[self.job][key], self.rng))

    def odd(self) -> None:
        self.put(self._any(self.job), self.rng.choice(ODD))

    def unknown(self) -> None:
        self.put(misspell(self._any(self.job), self.rng), self.rng.choice(ODD))

    def foreign(self) -> None:
        job = self.rng.choice(JOBS)
        key = self._any(job)
        self.put(key, accepted(KEYS[job][key], self.rng))

    def alias(self) -> None:
        self.put(self.rng.choice(list(ALIASES)), self.rng.choice(ODD))

    def section(self) -> None:
        self.put(self.rng.choice(["model", "data", "train", "model.lora", self.job, "eval"]), self.rng.choice(ODD))

    def text(self) -> str:
        """Return the recipe file as YAML, with nested or dotted keys, as users write them."""
        tree: dict[str, Any] = {}
        for key, value in self.file.items():
            section, dot, name = key.partition(".")
            inner = tree.get(section)
            if dot and isinstance(inner, dict | None) and self.rng.random() < 0.9:
                tree[section] = {**(inner or {}), name: value}
            else:
                tree[key] = value
        text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False, default_flow_style=self.rng.random() < 0.2)
        return self.trap(text, self.rng) if self.trap else text


def at_a_line(insert: Callable[[list[str], random.Random], str]) -> Callable[[str, random.Random], str]:
    def trap(text: str, rng: random.Random) -> str:
        lines = text.splitlines(keepends=True)
        lines.insert(rng.randint(0, len(lines)), insert(lines, rng))
        return "".join(lines)

    return trap


TRAPS: list[Callable[[str, random.Random], str]] = [
    at_a_line(lambda lines, rng: rng.choice(lines or ["a: 1\n"])),  # a duplicate key
    at_a_line(lambda lines, rng: "a: &a [1]\nb: *a\n"),
    at_a_line(lambda lines, rng: "a: &a {<<: *a}\n"),
    at_a_line(lambda lines, rng: f"x: !!{rng.choice(['int', 'bool', 'float', 'timestamp', 'set', 'omap'])} ''\n"),
    at_a_line(lambda lines, rng: "x: !!python/object/apply:os.mkdir [./canary]\n"),
    at_a_line(lambda lines, rng: "x: " + "[" * (depth := rng.choice([5, 60, 3000])) + "]" * depth + "\n"),
    at_a_line(lambda lines, rng: "x: " + "{a: " * (depth := rng.choice([5, 60, 900])) + "}" * depth + "\n"),
    at_a_line(lambda lines, rng: rng.choice(["\t\n", "---\n", "...\n", "? [a]\n: 1\n", "%YAML 9.9\n", "'\n"])),
    at_a_line(lambda lines, rng: f"train.steps: {'9' * rng.choice([20, 400, 5000])}\n"),
    lambda text, rng: text[: rng.randint(0, len(text))],
    lambda text, rng: text.replace("\n", rng.choice(["\r\n", "\r", "\x85", "\u2028"])),
    lambda text, rng: "\ufeff" + text,
    lambda text, rng: text.replace(rng.choice(text), rng.choice(["\x00", "\x1b", "{", ":", "é", "\ufffe"])),
    lambda text, rng: text + "".join(f"key{n}: {n}\n" for n in range(300)),
]
