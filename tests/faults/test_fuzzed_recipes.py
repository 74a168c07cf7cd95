"""R12: any recipe loads, or all of its problems are named at once; a resolved recipe survives its lock."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzed import KEYS, SHAPE, VALID, WRONG, Fuzz

from redline.errors import RecipeError, UsageError, UserError
from redline.hardware.machine import Machine
from redline.jobs.base import JOBS
from redline.recipe import load as loading
from redline.recipe import lock as locking
from redline.recipe.load import load
from redline.recipe.lock import locked_recipe, make_lock, read_lock, write_lock
from redline.recipe.resolve import DataFacts, resolve

MOST_S = 0.3
DATA = DataFacts(257, 100_000, 5_000, "data", "bytes", "tokenizer")
MACHINES = [
    Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11),
    Machine("cuda", "NVIDIA H200", 141 * 10**9, 16, (9, 0), fast_bf16=True),
    Machine("cuda", "Tesla V100", 1 << 30, 1, (7, 0)),
]
BASE: dict[str, Any] = {
    "size": None,
    "layers": 2,
    "d_model": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "d_ff": 128,
}
BASE |= {"vocab": 320, "value_embeddings": 0, "skips": "none", "mlp": "swiglu", "rope_scaling": None}


def outcome(path: Path, words: list[str]) -> tuple[Any, UserError | None, float]:
    """Load a recipe; return the result and the CPU time."""
    begin, error, loaded = time.process_time(), None, None
    try:
        loaded = load(str(path), words)
    except (RecipeError, UsageError) as refusal:
        error = refusal
    return loaded, error, time.process_time() - begin


def refuses_well(error: UserError) -> bool:
    named = error.problems if isinstance(error, RecipeError) else [error]
    return bool(named) and all(one.what.strip() for one in named) and len(str(error)) < 200_000


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locking, "git_state", lambda: {"commit": None, "dirty": None})
    for job in JOBS:  # imports are not what is measured
        (tmp_path / "first.yaml").write_text(json.dumps({"objective": job, "train.steps": 1, **VALID[job]}))
        load("first.yaml")
    return tmp_path / "fuzz.yaml"


def check_lock(recipe: Any, machine: Machine, run: Path) -> bool:
    """Return whether it resolves; the lock must then restore the same recipe."""
    if recipe.model.base is not None:  # which has its own shape
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=BASE)})
    try:
        resolved = resolve(recipe, machine, DATA)
    except UserError:
        return False
    write_lock(run, make_lock("fuzz", "id", resolved, DATA))
    again = locked_recipe(run, read_lock(run)).recipe
    assert again.model_dump() == resolved.recipe.model_dump()
    assert resolve(again, machine, DATA).recipe.model_dump() == resolved.recipe.model_dump()
    return True


@pytest.mark.parametrize("trials", [300, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_fuzzed_recipes(path: Path, say: Any, trials: int) -> None:
    counts = {"loaded": 0, "refused": 0, "resolved": 0}
    slowest = 0.0
    for seed in range(trials):
        fuzz = Fuzz(seed)
        path.write_text(fuzz.text(), encoding="utf-8", errors="surrogatepass")
        loaded, error, seconds = outcome(path, fuzz.words)
        if seconds > MOST_S:  # once more: the collector of the suite's own garbage may have come by
            seconds = outcome(path, fuzz.words)[2]
        slowest = max(slowest, seconds)
        assert seconds < MOST_S, (seed, fuzz.file, fuzz.words)
        assert error is None or refuses_well(error), (seed, error)
        counts["refused" if error else "loaded"] += 1
        if loaded is not None:
            machine = fuzz.rng.choice(MACHINES)
            counts["resolved"] += check_lock(loaded.recipe, machine, path.parent)
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    say(f"R12: {trials} fuzzed recipes: {told}; 0 tracebacks, slowest {slowest:.3f} s")
    assert not (path.parent / "canary").exists()
    assert min(counts.values()) > trials // 8, "the generator makes recipes of every kind"


@pytest.mark.parametrize("trials", [40, pytest.param(1000, marks=pytest.mark.soak)])
def test_every_problem_is_named(path: Path, say: Any, trials: int) -> None:
    named = 0
    for seed in range(trials):
        chance = random.Random(seed)
        job = chance.choice(JOBS)
        broken = chance.sample([key for key in KEYS[job] if key != "objective"], chance.randint(1, 12))
        tree = {"objective": job, "train.steps": 10, **VALID[job], "nothing.of_this": 1} | dict.fromkeys(broken, WRONG)
        path.write_text(json.dumps(tree))
        error = outcome(path, [])[1]
        assert isinstance(error, RecipeError)
        assert {problem.key for problem in error.problems} == {*broken, "nothing"}, seed
        named += len(error.problems)
    say(f"R12: {named} problems in {trials} recipes, each of them named")


CURATED = {
    "a number as text": ("train: {lr: 1e-4, steps: 1e3}", True),
    "a key twice": ("train: {steps: 1, steps: 2}", False),
    "a key twice, by its section": ("train: {steps: 1}\ntrain.steps: 2", None),
    "references": ("train: &t {steps: 1}\neval: *t", False),
    "an anchor that nobody uses": ("train: &t {steps: 1}", True),
    "a merge": ("train: {<<: {steps: 1}}", False),
    "a laugh": ("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\ntrain: {steps: *c}", False),
    "a python object": ("description: !!python/object/apply:os.mkdir [./canary]", False),
    "a python name": ("description: !!python/name:os.system", False),
    "a time that is none": ("description: !!timestamp never", False),
    "a truth that is none": ("description: !!bool maybe", False),
    "a number without digits": ("description: !!int ''", False),
    "tags that would do": ("train: {steps: !!int 3}", False),
    "matrices that are lists": ("model: {lora: {target_modules: [[1]]}}", False),
    "a hundred levels": ("description: " + "[" * 100 + "]" * 100, False),
    "thousands of levels": ("description: " + "[" * 9000, False),
    "a thousand unknown keys": ("".join(f"key{n}: {n}\n" for n in range(1000)), False),
    "a word of 9000 letters": ("a" * 9000, False),
    "an integer of 4000 digits": ("train: {steps: " + "9" * 4000 + "}", False),
    "an integer of 5000 digits": ("train: {steps: " + "9" * 5000 + "}", False),
    "half a character": ('description: "\\uD800"', True),
    "a book": ("# a\n" * 20_000, False),
    "two documents": ("train: {steps: 1}\n---\ntrain: {steps: 2}", False),
    "a list": ("- train", False),
    "nothing": ("", False),
    "an unknown job": ("objective: causal_ml", False),
    "a job that is a list": ("objective: [causal_lm]", False),
    "another job's section": ("objective: causal_lm\nfinetune: {method: lora}", False),
    "numbers beyond floats": (f"train: {{hours: 1e400, lr: {'9' * 400}}}", False),
    "more layers than memory": ("model: {layers: 9e18, d_model: 32, heads: 1}", False),
    "wider than memory": ("model: {layers: 2, d_model: 9e18, heads: 1}", False),
    "wide": ("model: {layers: 2, d_model: 1t, heads: 1}", True),
}


@pytest.mark.parametrize(("text", "loads"), CURATED.values(), ids=CURATED)
def test_curated_bad_recipes(path: Path, text: str, loads: bool | None) -> None:
    """Load it alone and with the required keys. `None` accepts either result."""
    begin = "model.layers: 2\nmodel.d_model: 32\nmodel.heads: 2\n" if "layers" not in text else ""
    stop = "train.tokens: 10\n"
    path.write_text(text if text[:1] in ("-", "") else f"{begin}{stop}{text}", encoding="utf-8")
    loaded, error, seconds = outcome(path, [])
    assert seconds < MOST_S
    assert loads is None or (loaded is not None) == loads, error
    assert error is None or refuses_well(error)
    if loaded is not None:
        check_lock(loaded.recipe, MACHINES[0], path.parent)
    assert not (path.parent / "canary").exists()


def test_words_of_the_command_line(path: Path) -> None:
    """Arguments that no file can contain: too long names, bytes that are not text, keys of five thousand words."""
    path.write_text(json.dumps({"train.steps": 10, **SHAPE}))
    for words in (
        ["train.steps." + "a." * 5000 + "b=1"],
        ["=1"],
        ["train=\udcff"],
        ["+"],
        ["train.steps=[" + "[" * 5000],
    ):
        assert outcome(path, words)[1] is not None, words
    loaded, error, _ = outcome(path, ["description=\udcff"])
    assert error is None
    check_lock(loaded.recipe, MACHINES[0], path.parent)
    for name in ("x" * 5000, "a/" * 3000, "\0", "é\udcff.yaml"):
        assert isinstance(outcome(Path(name), [])[1], UsageError)


@pytest.mark.parametrize("defect", ["first problem only", "a lock that rounds", "yaml as it comes"])
def test_planted_defects_are_caught(path: Path, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    """R18: the checks above fail if loading names fewer problems, the lock loses keys, or YAML errors leak."""
    if defect == "first problem only":
        monkeypatch.setattr(loading.RecipeError, "__init__", _names_the_first)
        with pytest.raises(AssertionError):
            test_every_problem_is_named(path, lambda _: None, 5)
    elif defect == "a lock that rounds":
        monkeypatch.setattr(locking.json, "loads", lambda text: json.JSONDecoder(parse_float=_rounded).decode(text))
        with pytest.raises((AssertionError, RecipeError)):
            test_fuzzed_recipes(path, lambda _: None, 60)
    else:
        monkeypatch.setattr(loading._Loader, "compose_node", yaml.SafeLoader.compose_node)
        with pytest.raises((AttributeError, KeyError, IndexError, AssertionError)):
            test_fuzzed_recipes(path, lambda _: None, 300)


def _rounded(text: str) -> float:
    return round(float(text), 2)


def _names_the_first(self: RecipeError, where: str, problems: Any) -> None:
    self.problems = list(problems)[:1]
    UserError.__init__(self, "; ".join(p.line() for p in self.problems), where=where)
