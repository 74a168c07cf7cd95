"""The latent prefix comparison: both loops train on the same terms, and the figures are what their names say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks import latent, latent_steps
from benchmarks.__main__ import app
from benchmarks.latent import CONTENDERS, TEXTBOOK, add_ratios, choose
from benchmarks.latent_steps import timed_rows
from benchmarks.peers import hf_qlora, latent_textbook
from redline.bench.child import ChildError
from redline.errors import UsageError, UserError
from redline.jobs.latent_prefix import frozen as latent_models
from redline.kernels.cross_entropy import IGNORE
from redline.models import pretrained as adapted
from redline.recipe.resolve import DataFacts, resolve

pytest.importorskip("transformers", reason="the textbook's models are transformers'")

CPU = "train.device=cpu"
FACTS = DataFacts(257, 10**9, 10**7, "", "bytes", "")
TERMS = ("ce", "first", "k", "kd", "words")
FIGURES = {
    "texts_per_s": 40.0,
    "step_ms": 100.0,
    "memory_gib": 0.5,
    "first_loss": 10.0,
    "first_terms": {"ce_0": 6.0, "kd_0": 4.0},
    "micro_batch": 4,
    "precision": "fp32",
    "compiled": False,
}


def request_for(*overrides: str, **more: Any) -> dict[str, Any]:
    """Return the request that the process of a row gets."""
    setting = choose(None, [CPU, *overrides])
    recipe = resolve(setting.recipe, setting.machine, FACTS).recipe.model_dump(mode="json")
    return {"recipe": recipe, "facts": asdict(FACTS), "steps": 1, "micro_batch": 4, "one_pass": False, **more}


@pytest.fixture
def outputs_depend_on_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale up random models so that their outputs depend on the text; otherwise teacher and student hardly differ."""

    def scaled_tensors(*what: Any, **how: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in adapted.random_tensors(*what, **how):
            yield name, tensor if tensor.dim() == 1 else 8 * tensor

    monkeypatch.setattr(latent_models, "random_tensors", scaled_tensors)
    monkeypatch.setattr(hf_qlora, "random_tensors", scaled_tensors)


# --- the same work


@pytest.mark.usefixtures("outputs_depend_on_text")
@pytest.mark.parametrize("words", [(), ("train.micro_batch=2", "latent_prefix.private_slots=2", "model.tied=false")])
def test_every_term_of_redlines_step_is_the_textbooks(words: tuple[str, ...]) -> None:
    ours = latent_steps.measure(request_for(*words))
    names = {*(f"{term}_{model}" for term in TERMS for model in "01"), "scale"}
    assert ours["first_terms"].keys() == names
    assert ours["first_terms"]["kd_0"] > 0.1, "what the teacher says matters"
    for one_pass, micro in ((False, 4), (True, 1)):
        theirs = latent_textbook.measure(request_for(*words, one_pass=one_pass, micro_batch=micro))
        assert theirs["first_terms"].keys() == names
        for name, value in theirs["first_terms"].items():
            assert ours["first_terms"][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
        assert ours["last_loss"] == pytest.approx(theirs["last_loss"], rel=1e-3), "and they learn alike"
        assert ours["last_loss"] != pytest.approx(ours["first_loss"], abs=1e-3)


@pytest.mark.usefixtures("outputs_depend_on_text")
def test_quantised_models_are_the_same_too() -> None:
    pytest.importorskip("bitsandbytes")
    request = request_for("model.quant=nf4")
    ours, theirs = latent_steps.measure(request), latent_textbook.measure(request)
    for name, value in theirs["first_terms"].items():
        assert ours["first_terms"][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    plain = latent_textbook.measure(request_for())
    assert abs(plain["first_terms"]["ce_0"] - theirs["first_terms"]["ce_0"]) > 2e-4


@pytest.mark.parametrize(("one_pass", "student"), [(False, 2 + 4), (True, 1)])
def test_the_textbook_runs_as_many_forward_passes_as_named(
    one_pass: bool, student: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count, for each step and model, the student's forward passes and one of the teacher."""
    calls = {"after_prefix": 0, "after_text": 0}
    for name in calls:
        real = getattr(latent_textbook.Reader, name)

        def counted(self: Any, *what: Any, real: Any = real, name: str = name) -> Any:
            calls[name] += 1
            return real(self, *what)

        monkeypatch.setattr(latent_textbook.Reader, name, counted)
    result = latent_textbook.measure(request_for(one_pass=one_pass))
    passes = 1 + 3 + result["steps"]  # one shows that it fits, three are not timed
    assert calls == {"after_prefix": 2 * student * passes, "after_text": 2 * passes}


def test_rows_are_those_of_training() -> None:
    recipe = choose(None, [CPU, "latent_prefix.bytes=2048", "latent_prefix.patch=4"]).recipe
    rows = timed_rows(recipe, {"0": 512, "1": 300}, 200)
    again = timed_rows(recipe, {"0": 512, "1": 300}, 200)
    assert all(torch.equal(tensor, again.batch[key]) for key, tensor in rows.batch.items())
    sizes = (rows.batch["bytes"] != 256).sum(1).float()
    assert 700 < sizes.median() < 900
    assert 780 < sizes.mean() < 950, "as SQuAD's: 867"
    assert 150 < rows.prompt_tokens < 200, "as SQuAD's: 180"
    for name, vocabulary in (("0", 512), ("1", 300)):
        targets = rows.batch[f"targets.{name}"]
        assert targets.max() < vocabulary
        for row, answer in zip(targets.tolist(), rows.answers[name], strict=True):
            assert [token for token in row if token != IGNORE] == answer
    parts = rows.micros(50)
    assert torch.equal(torch.cat([part.batch["targets.1"] for part in parts]), rows.batch["targets.1"])
    assert [prompt for part in parts for prompt in part.prompts["1"]] == rows.prompts["1"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("latent_prefix.match_weight=1", "match_weight"),
        ("latent_prefix.fade_steps=9", "fade_steps"),
        ("train.optimizer=muon", "muon"),
        ("model.softcap=30", "softcap"),
    ],
)
def test_the_textbook_refuses_unsupported_settings(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        latent_textbook.measure(request_for(word))


# --- the command


def test_the_table_with_a_failed_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []

    def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
        requests.append({"module": module.rpartition(".")[2], **request})
        if request.get("one_pass"):
            raise ChildError("CUDA out of memory.")
        return FIGURES if module.endswith("textbook") else {**FIGURES, "step_ms": 20.0, "teacher_ms": 5.0}

    monkeypatch.setattr(latent, "ask", ask)
    answer = CliRunner().invoke(app, ["latent", CPU, "train.steps=7", "--json"])
    assert answer.exit_code == 0, answer.output
    rows = json.loads(answer.stdout.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == [one.name for one in CONTENDERS]
    assert (rows[0]["times_textbook"], rows[0]["times_textbook_one_epoch"]) == (5.0, 4.0)
    assert rows[2]["error"] == "CUDA out of memory."
    assert [one["module"] for one in requests] == ["latent_steps", "latent_textbook", "latent_textbook"]
    assert len({json.dumps([one["recipe"], one["facts"], one["steps"]]) for one in requests}) == 1, (
        "the same work for all"
    )
    assert requests[0]["steps"] == 7

    def broken(module: str, request: dict[str, Any]) -> dict[str, Any]:
        raise ChildError("no")

    monkeypatch.setattr(latent, "ask", broken)
    assert CliRunner().invoke(app, ["latent", CPU]).exit_code == 1


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(-1.0, 1.0))
def test_ratios_are_to_the_textbook(ours: float, theirs: float, difference: float) -> None:
    terms = {"ce_0": 6.0 + difference, "kd_0": 4.0}
    rows: list[Any] = [
        {"name": "redline", **FIGURES, "step_ms": ours, "teacher_ms": ours, "first_terms": terms},
        {"name": TEXTBOOK, **FIGURES, "step_ms": theirs},
        {"name": "other", "error": "no"},
    ]
    first, second, third = add_ratios(rows)
    assert first["times_textbook"] == pytest.approx(theirs / ours)
    assert first["times_textbook_one_epoch"] == pytest.approx(theirs / ours / 2)
    assert first["terms_apart"] == pytest.approx(abs(difference) / 10.0)
    assert (second["times_textbook"], second["terms_apart"]) == (1.0, 0.0)
    assert third == rows[2]
    assert add_ratios(rows[:1]) == rows[:1], "nothing to compare with"


def test_other_jobs_are_refused_and_a_recipe_that_is_named_stays_as_it_is() -> None:
    with pytest.raises(UsageError, match="a recipe for causal_lm"):
        choose("quickstart", [CPU])
    named: Any = choose("latentwire-squad", [CPU]).recipe
    assert (named.model.layers, named.model.quant, named.train.steps) == (32, "nf4", 3)
    assert choose(None, [CPU, "model.layers=3"]).recipe.model.layers == 3
