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
FIRST = {  # of each job a recipe that loads
    "causal_lm": SHAPE,
    "finetune": {**SHAPE, "model.base": "./base"},
    "latent_prefix": {**SHAPE, "model.base": "./base"},
    "block_diffusion": {**SHAPE, "data.seq_len": 64},
    "hierarchical_diffusion": SHAPE,
}
WRONG: list[Any] = [[[1]]]  # of a type that no key has
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


def accepted(form: dict[str, Any], chance: random.Random) -> Any:
    """Draw a value that the schema accepts."""
    if "anyOf" in form:
        return accepted(chance.choice(form["anyOf"]), chance)
    if "enum" in form or "const" in form:
        return chance.choice(form.get("enum") or [form["const"]])
    kind = form.get("type")
    if kind in ("integer", "number"):
        low = form.get("minimum", form.get("exclusiveMinimum", 0))
        whole = [low + 1, low + 2, 4, 8, 16, 64, 128, 1000, 2**40]
        real = [low + 1e-9, 1e-4, 0.5, 0.9, form.get("maximum", 3e4)]
        return chance.choice(whole if kind == "integer" else real)
    if "pattern" in form:
        return chance.choice(["8", "64", "1k", "2M", "1e3"])
    lists = [[0.8, 0.9], ["q_proj", "v_proj"], [{"source": "a", "weight": 2.5}, "b"]]
    ropes = [{"rope_type": "linear", "factor": 2.0}]
    others = {"boolean": [True, False], "null": [None], "string": TEXTS, "array": lists, "object": ropes}
    return chance.choice(others[str(kind)] if kind in others else TEXTS)


def misspelt(key: str, chance: random.Random) -> str:
    place = chance.randrange(len(key))
    letter = chance.choice(["", "x", "_", ".", "é", key[place] * 2])
    return key[:place] + letter + key[place + 1 :]


class Fuzz:
    """One recipe: keys for a file, words for a command line."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.job = self.chance.choice(JOBS)
        self.file: dict[str, Any] = {"objective": self.job, "train.steps": 10, **FIRST[self.job]}
        self.words: list[str] = []
        changes = [self.right, self.right, self.right, self.odd, self.unknown, self.foreign, self.alias, self.section]
        gentle = self.chance.random() < 0.5  # half of them should mostly load
        for _ in range(self.chance.randint(0, 4)):
            (self.right if gentle else self.chance.choice(changes))()
        self.trap = None if gentle else self.chance.choice([None, None, *TRAPS])

    def put(self, key: str, value: Any) -> None:
        if self.chance.random() < 0.3:
            text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0]
            self.words.append(f"{key}={text}")
        else:
            self.file[key] = value

    def _any(self, job: str) -> str:
        return self.chance.choice(list(KEYS[job]))

    def right(self) -> None:
        key = self._any(self.job)
        if key != "objective":
            self.put(key, accepted(KEYS[self.job][key], self.chance))

    def odd(self) -> None:
        self.put(self._any(self.job), self.chance.choice(ODD))

    def unknown(self) -> None:
        self.put(misspelt(self._any(self.job), self.chance), self.chance.choice(ODD))

    def foreign(self) -> None:
        job = self.chance.choice(JOBS)
        key = self._any(job)
        self.put(key, accepted(KEYS[job][key], self.chance))

    def alias(self) -> None:
        self.put(self.chance.choice(list(ALIASES)), self.chance.choice(ODD))

    def section(self) -> None:
        self.put(
            self.chance.choice(["model", "data", "train", "model.lora", self.job, "eval"]), self.chance.choice(ODD)
        )

    def text(self) -> str:
        """Return it as YAML, with sections as nested or dotted keys, as people write them."""
        tree: dict[str, Any] = {}
        for key, value in self.file.items():
            section, dot, name = key.partition(".")
            inner = tree.get(section)
            if dot and isinstance(inner, dict | None) and self.chance.random() < 0.9:
                tree[section] = {**(inner or {}), name: value}
            else:
                tree[key] = value
        text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False, default_flow_style=self.chance.random() < 0.2)
        return self.trap(text, self.chance) if self.trap else text


def at_a_line(insert: Callable[[list[str], random.Random], str]) -> Callable[[str, random.Random], str]:
    def trap(text: str, chance: random.Random) -> str:
        lines = text.splitlines(keepends=True)
        lines.insert(chance.randint(0, len(lines)), insert(lines, chance))
        return "".join(lines)

    return trap


TRAPS: list[Callable[[str, random.Random], str]] = [
    at_a_line(lambda lines, chance: chance.choice(lines or ["a: 1\n"])),  # a key twice
    at_a_line(lambda lines, chance: "a: &a [1]\nb: *a\n"),
    at_a_line(lambda lines, chance: "a: &a {<<: *a}\n"),
    at_a_line(lambda lines, chance: f"x: !!{chance.choice(['int', 'bool', 'float', 'timestamp', 'set', 'omap'])} ''\n"),
    at_a_line(lambda lines, chance: "x: !!python/object/apply:os.mkdir [./canary]\n"),
    at_a_line(lambda lines, chance: "x: " + "[" * (depth := chance.choice([5, 60, 3000])) + "]" * depth + "\n"),
    at_a_line(lambda lines, chance: "x: " + "{a: " * (depth := chance.choice([5, 60, 900])) + "}" * depth + "\n"),
    at_a_line(lambda lines, chance: chance.choice(["\t\n", "---\n", "...\n", "? [a]\n: 1\n", "%YAML 9.9\n", "'\n"])),
    at_a_line(lambda lines, chance: f"train.steps: {'9' * chance.choice([20, 400, 5000])}\n"),
    lambda text, chance: text[: chance.randint(0, len(text))],
    lambda text, chance: text.replace("\n", chance.choice(["\r\n", "\r", "\x85", "\u2028"])),
    lambda text, chance: "\ufeff" + text,
    lambda text, chance: text.replace(chance.choice(text), chance.choice(["\x00", "\x1b", "{", ":", "é", "\ufffe"])),
    lambda text, chance: text + "".join(f"key{n}: {n}\n" for n in range(300)),
]
