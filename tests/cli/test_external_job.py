"""A job of another package, examples/classifier_job, is found by its entry point and works with every verb."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import redline as library
from redline.cli.main import app
from redline.errors import UserError
from redline.jobs import base
from redline.recipe.load import load
from several import run_ranks

PACKAGE = Path(__file__).parents[2] / "examples/classifier_job"
SMALL = (
    *("model.layers=1", "model.d_model=32", "model.heads=2", "model.d_ff=64", "data.seq_len=24", "data.workers=1"),
    *("train.device=cpu", "train.precision=fp32", "train.steps=4", "train.global_batch=8", "train.micro_batch=4"),
    *("train.warmup_steps=1", "eval.every=2", "eval.sequences=20", "checkpoint.every=2", "monitor.log_every=1"),
    *("train.schedule=constant", "classifier.labels=[stone, river]"),
)
VERBS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
MOST_LINES = 200  # of the example: a job that needs more than that needs a better interface
Redline = Callable[..., Any]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the package and the metadata that an installer makes of its pyproject.toml on the path."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    metadata = (
        tmp_path_factory.mktemp("installed") / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    )
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    entries = project["entry-points"]["redline.jobs"].items()
    (metadata / "entry_points.txt").write_text(
        "[redline.jobs]\n" + "".join(f"{name} = {address}\n" for name, address in entries)
    )
    monkeypatch.syspath_prepend(str(metadata.parent))
    monkeypatch.syspath_prepend(str(PACKAGE))
    base._installed.cache_clear()
    yield
    base._installed.cache_clear()
    base._load.cache_clear()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Labelled texts: what each is about is in its words."""
    chance, words = random.Random(3), ["red", "line", "token", "light", "king"]
    path = tmp_path / "rows.jsonl"
    texts = [(" ".join(chance.choices(words, k=3)), chance.choice(("stone", "river"))) for _ in range(200)]
    path.write_text("".join(json.dumps({"text": f"{text} {label}", "label": label}) + "\n" for text, label in texts))
    return path


@pytest.fixture
def recipe(rows: Path, tmp_path: Path) -> str:
    (tmp_path / "classifier.yaml").write_text((PACKAGE / "classifier.yaml").read_text())
    return "classifier.yaml"


@pytest.mark.usefixtures("installed")
def test_every_verb_works_with_a_job_of_another_package(
    inside: Redline, recipe: str, rows: Path, tmp_path: Path, tensors_of: Callable[[Path], dict[str, Any]]
) -> None:
    def run(*words: str) -> str:
        answer = inside(*words)
        assert answer.code == 0, answer.err
        return str(answer.out)

    plan = json.loads(run("plan", recipe, *SMALL, "--gpu", "h100", "--json"))
    assert plan["objective"] == "classifier"
    assert plan["parameters"]["total"] == 320 * 32 + 2 * 32 + plan["parameters"]["matmul"] - 2 * 32 + 3 * 32
    preview = run("train", recipe, *SMALL, "--preview", "2")
    assert "--- row 2" in preview
    assert "→ [[" in preview
    assert "document 1" in run("prepare", str(rows), "--preview", "1", "--tokenizer", "bytes")

    run("train", recipe, *SMALL, "--run", "whole")
    run("train", recipe, *SMALL, "train.steps=2", "--run", "runs/parts")
    run("train", "--resume", "runs/parts", "train.steps=4")
    whole, parts = (tensors_of(tmp_path / name / "checkpoints/step-00000004") for name in ("whole", "runs/parts"))
    assert whole.keys() == parts.keys()
    assert all(tensor.equal(parts[name]) for name, tensor in whole.items()), "a resume is exact"

    lock = json.loads((tmp_path / "whole/lock.json").read_text())
    assert lock["recipe"]["classifier"] == {"labels": ["stone", "river"]}
    assert lock["parameters"]["total"] == sum(
        tensor.numel() for name, tensor in whole.items() if name.startswith("model/")
    ), "the plan counts what is trained"
    evaluated = json.loads(run("eval", "whole", "--json"))
    assert (evaluated["step"], evaluated["loss"] > 0, 0 <= evaluated["accuracy"] <= 1) == (4, True, True)
    assert "perplexity" not in evaluated
    other = json.loads(run("eval", "whole", "--json", "--data", str(rows)))
    assert other["held_out"]["shared_with_training"] > 0, "rows that were trained on are recognised"
    sample = json.loads(run("sample", "whole", "--prompt", "the red river", "--json"))["samples"]
    assert [one["text"].split()[0] in ("stone", "river") for one in sample] == [True]
    assert "classifier" in json.dumps(json.loads(run("report", "whole", "--json")))
    assert (tmp_path / "whole/report.html").is_file()
    assert [row["name"] for row in json.loads(run("runs", "--json"))] == ["parts"]
    assert "labels = [negative, positive]" in run("keys", "classifier")


@pytest.mark.usefixtures("installed")
def test_the_export_is_a_classifier_of_transformers(inside: Redline, recipe: str, rows: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    assert inside("train", recipe, *SMALL, "--run", "run").code == 0
    answer = inside("export", "run", "--out", "model")
    assert "AutoModelForSequenceClassification.from_pretrained('model')" in answer.out
    card = (tmp_path / "model/README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "| accuracy |" in card
    assert "continues text" not in card
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.id2label == {0: "stone", 1: "river"}
    texts = ["a stone", "the king and the river"]  # of two lengths: one of them is padded
    batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        theirs = model(**batch).logits
    objective: Any = library.open_run(tmp_path / "run").model().objective
    assert torch.allclose(theirs, objective.logits([(text, 0) for text in texts]), atol=1e-5)
    assert inside("train", recipe, *SMALL, "model.mlp=relu2", "--run", "odd").code == 0
    refused = inside("export", "odd", "--out", "odd-model")
    assert refused.code == 1
    assert "model.mlp" in refused.message


def test_it_learns_through_the_library(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    """Nothing is installed: the job is registered in this process, and learns to tell its rows apart."""
    monkeypatch.setattr(base, "_registered", {})
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.chdir(tmp_path)
    from redline_classifier import ClassifierJob

    library.register_job(ClassifierJob())
    longer = ("train.steps=40", "train.lr=5e-3", "eval.every=40", "checkpoint.every=40")
    run = library.train(str(PACKAGE / "classifier.yaml"), *SMALL, *longer, show=False)
    assert run.metrics["accuracy"] > 0.9
    assert run.sample("red line river")[0].text.startswith("river")
    assert run.sample("red line stone")[0].text.startswith("stone")


@pytest.mark.usefixtures("installed")
def test_its_mistakes_are_answered_like_those_of_redline(inside: Redline, recipe: str, rows: Path) -> None:
    for word in ("classifier.labels=[one]", "classifier.labelz=3", "data.tokenizer=gpt2", "model.tied=false"):
        refused = inside("plan", recipe, *SMALL, word)
        assert refused.code == 2
        assert word.partition("=")[0] in refused.message
    rows.write_text(rows.read_text() + '{"text": "no label"}\n' * 3)
    assert "3 of them unusable" in inside("train", recipe, *SMALL, "--run", "run").err
    refused = inside("train", recipe, *SMALL, "classifier.labels=[lake, sea]", "--run", "other")
    assert refused.code == 1
    assert "is not in classifier.labels" in refused.message


@pytest.mark.usefixtures("installed")
def test_the_readme_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script makes rows that the recipe reads, and its commands exist."""
    page = (PACKAGE / "README.md").read_text(encoding="utf-8")
    script = re.findall(r"^```python\n(# make_rows.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "make_rows.py").write_text(script, encoding="utf-8")
    subprocess.run([sys.executable, "-S", "make_rows.py"], cwd=tmp_path, check=True, timeout=60)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 1000
    assert {row["label"] for row in rows} == {*load(str(PACKAGE / "classifier.yaml")).recipe.classifier.labels}
    commands = [shlex.split(line) for line in re.findall(r"^\$ redline (.*)$", page, re.MULTILINE)]
    assert {verb for verb, *_ in commands} >= {"plan", "train", "eval", "sample", "export", "report", "keys"}
    monkeypatch.chdir(PACKAGE)
    for verb, *words in commands:
        VERBS[verb].make_context(verb, words)  # raises for what is no option
        if "classifier.yaml" in words:
            assert load("classifier.yaml", [word for word in words if "=" in word]).recipe


def test_the_example_is_short() -> None:
    files = [*PACKAGE.rglob("*.py")]
    assert sum(len(path.read_text().splitlines()) for path in files) < MOST_LINES


def test_without_the_package_the_job_is_unknown(inside: Redline, recipe: str) -> None:
    base._installed.cache_clear()
    refused = inside("plan", recipe)
    assert refused.code == 2
    assert "objective" in refused.message


def test_an_entry_point_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_installed", lambda: {"gone_lm": "no_such_package:Job", "other_lm": "json:JSONDecoder"})
    for name in ("gone_lm", "other_lm"):
        with pytest.raises(UserError, match=name):
            base.job(name)


def test_a_job_is_registered_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_registered", {})

    class Mine(base.Job):
        name = "mine_lm"
        runtime = "nowhere:Nothing"

        def costs(self, recipe: Any, rows: Any = None, micro: int = 1) -> Any:
            raise NotImplementedError

    mine = Mine()
    base.register_job(mine)
    assert base.job("mine_lm") is mine
    assert base.is_job("mine_lm")
    assert "mine_lm" in base.job_names()
    Mine.name = "causal_lm"
    with pytest.raises(ValueError, match="causal_lm"):
        base.register_job(mine)


def test_a_plan_of_a_job_of_redline_reads_no_entry_points_and_imports_no_other_job() -> None:
    code = (
        "import sys\n"
        "from redline.recipe.load import load\n"
        "load('pretrain-350m')\n"
        "print([name for name in sys.modules if name.startswith('redline.jobs.') or name == 'torch'])\n"
        "from redline.jobs import base\n"
        "print(base._installed.cache_info().misses)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, misses = done.stdout.splitlines()
    assert misses == "0"
    assert "torch" not in modules
    assert "causal_lm" in modules
    assert not any(name in modules for name in ("finetune", "latent_prefix", "diffusion"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_its_model_is_sharded_though_the_job_knows_nothing_of_it(
    recipe: str, rows: Path, tmp_path: Path, precision: str
) -> None:
    import numpy as np
    import torch

    from redline.hardware.machine import Machine
    from redline.jobs.objective import job_runtime
    from redline.recipe.resolve import resolve
    from redline.training.distributed import SINGLE_PROCESS, Ranks
    from redline.training.parallel import build_parallel

    words = (f"data.source={rows}", "parallel=fsdp", f"train.precision={precision}", "train.compile=false")
    loaded = load(str(tmp_path / recipe), [*SMALL, *words]).recipe
    data = job_runtime("classifier").load_data(loaded)

    def norm(ranks: Ranks) -> float:
        machine = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
        resolved = resolve(loaded, machine, data.facts, gpus=ranks.size)
        objective = job_runtime("classifier").create(resolved, data)
        cpu = torch.device("cpu")
        parallel = build_parallel(resolved.recipe.parallel, ranks, objective, cpu, restored=False)
        share = 8 // ranks.size
        parallel.begin_micro_batch(last=True)
        batch = objective.batch(np.arange(ranks.rank * share, (ranks.rank + 1) * share))
        sum(term.sum for term in objective.loss(batch).values()).backward()
        parallel.end_backward()
        return float(parallel.grad_norm([p.grad for p in parallel.parameters().values() if p.grad is not None]))

    def write(ranks: Ranks) -> None:
        (tmp_path / f"norm-{ranks.rank}").write_text(str(norm(ranks)))

    alone = norm(SINGLE_PROCESS)
    assert run_ranks(2, write, tmp_path / "logs") == [0, 0], (tmp_path / "logs/rank-0.log").read_text()
    found = [float((tmp_path / f"norm-{rank}").read_text()) for rank in (0, 1)]
    assert found == pytest.approx([alone] * 2, rel=1e-5 if precision == "fp32" else 2e-2)
