"""Diffusion on records, end to end: questions are given, plans and answers are denoised and graded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from redline.cli.main import app
from redline.errors import UsageError
from redline.evaluate.opened_run import open_run
from redline.evaluate.questions import score_answers
from redline.jobs.objective import Sampling
from redline.recipe.lock import locked_recipe
from redline.training.control import RunDirectory

HDP = (
    "objective=hierarchical_diffusion",
    "hierarchical_diffusion.question=160",
    "hierarchical_diffusion.plan=96",
    "hierarchical_diffusion.execution=128",
    "data.seq_len=384",
)
BD3 = ("objective=block_diffusion", "block_diffusion.question=160", "block_diffusion.block_size=16", "data.seq_len=288")
RECORDS = ("data.source=problems:easy:60", "data.pack=false", "data.val_fraction=0.2", "train.global_batch=4")


@pytest.fixture(params=[HDP, BD3], ids=["hdp", "bd3lm"])
def objective(request: Any, world: Any, tmp_path: Path) -> Any:
    with RunDirectory(tmp_path / "run") as run:
        return world.trainer(run, *RECORDS, *request.param).objective


def test_the_question_is_never_masked(objective: Any) -> None:
    given = objective._question_length
    rows = objective.data.training(np.arange(40))
    batch = objective.batch(np.arange(4))
    clean = len(objective.layout.noisy)  # the question is in the clean copy only
    assert torch.equal(batch["inputs"][:, clean : clean + given], torch.from_numpy(rows.tokens[:4, :given]))
    assert (batch["inputs"][:, :clean] == objective.data.vocabulary.mask).any()
    assert not rows.loss_mask[:, :given].any()


def test_padding_is_masked_so_lengths_do_not_leak(objective: Any) -> None:
    """Padding is masked like any other token."""
    rows = objective.data.training(np.arange(40))
    shape = (40, len(objective.layout.noisy))
    worst = objective._assemble(rows, np.ones(shape, dtype=bool), np.ones(shape, dtype=np.float32))
    noisy = worst["inputs"][:, : shape[1]]
    assert (noisy == objective.data.vocabulary.mask).all()


def test_held_out_questions_are_answered_and_graded(objective: Any) -> None:
    objective.select_questions(5)
    asked = objective.questions()
    assert len(asked) == 5
    assert objective.first_prompt() == asked[0].text
    trained, held_out = (set(objective.data.row_keys(trained=trained)) for trained in (True, False))
    assert len(held_out) == 5
    assert not trained & held_out
    assert all(one.reference.isdigit() for one in asked)
    answers = objective.answer(asked, 64)
    assert answers == objective.answer(asked[:3], 64) + objective.answer(asked, 64)[3:]
    assert all(one.forward_passes > 0 for one in answers)
    exam = score_answers(objective, "gsm8k", micro=4, count=5, tokens=64, where="here")
    result = exam.result()
    assert result["questions"] == 5
    assert result["forwards_per_answer"] > 1
    assert result["answers_per_s"] > 0


def test_samples_depend_on_the_seed_only(objective: Any) -> None:
    question = "Ann has 3 pens. How many pens has Ann?"
    first, again = (objective.sample(question, Sampling(count=2, seed=4)) for _ in range(2))
    assert first == again
    assert first[0].text != first[1].text
    assert objective.sample("", Sampling()) == []


def test_a_truncated_question_is_reported(objective: Any) -> None:
    told: list[str] = []
    objective.log = told.append
    objective.sample("a" * 160, Sampling())
    assert told == []
    objective.sample("a" * 1161, Sampling())
    (message,) = told
    assert "1,161" in message
    assert "160" in message


@pytest.mark.parametrize("job", [HDP, BD3], ids=["hdp", "bd3lm"])
def test_training_resumes_bit_for_bit(world: Any, tmp_path: Path, tensors_of: Any, job: Any) -> None:
    options = (*RECORDS, *job, "train.steps=8", "train.lr=5e-3", "eval.every=8")
    trainer = world.run(tmp_path / "whole", *options)
    world.run(tmp_path / "parts", *options, stop_at=3)
    world.run(tmp_path / "parts", *options, resume=True)
    whole, parts = (tensors_of(tmp_path / name / "checkpoints/step-00000008") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    losses = [event["loss"] for event in trainer.monitor.view.events if event["type"] == "eval"]
    assert losses[-1] < losses[0]


def test_the_sampler_can_be_changed_after_training(world: Any, tmp_path: Path) -> None:
    run = str(tmp_path / "other")
    words = [*world.tiny, *RECORDS, *HDP, "train.steps=2"]
    assert CliRunner().invoke(app, ["train", "quickstart", *words, "--run", run]).exit_code == 0
    long = CliRunner().invoke(app, ["sample", run, "--device", "cpu", "--prompt", "a" * 200])
    assert "200 tokens" in long.stderr
    assert "160" in long.stderr
    plain, quick = (
        open_run(Path(run), device="cpu", answers=True, settings=settings).objective
        for settings in ((), ("sampler=ancestral", "sampler_steps=1"))
    )
    for objective in (plain, quick):
        objective.select_questions(2)
    many, few = (one.answer(one.questions(), 64) for one in (plain, quick))
    assert (
        max(one.forward_passes for one in few) <= 9 < max(one.forward_passes for one in many)
    )  # a look a block: a plan, eight of steps
    for wrong in ("execution=3", "train.lr=1", "sampler=x", "sampler_steps=2"):
        with pytest.raises(UsageError):
            open_run(Path(run), device="cpu", settings=(wrong,))


def test_a_preview_shows_the_loss_mask(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from redline.cli.preview import preview_recipe

    preview_recipe(world.recipe(*RECORDS, *HDP), 2)
    said = capsys.readouterr().out
    for line in [line for line in said.splitlines() if "[[" in line]:
        question, learnt = line.split("[[", 1)
        assert question.endswith("<|pad|>") or " × " in question
        assert learnt.startswith("<|plan|>")
        assert "<|execution|>" in learnt
        assert "<|answer|>" in learnt
    assert "training records" in said
    assert said.count("[[") == 2


def test_padding_is_in_the_numerator_and_not_in_the_denominator(objective: Any) -> None:
    """A sampler has to generate the padding that ends a segment; the loss is still per content token."""
    rows, batch = objective.data.training(np.arange(4)), objective.batch(np.arange(4))
    padding = rows.loss_mask & (rows.tokens == objective.data.tokenizer.pad)
    learnt, content = int(rows.loss_mask.sum()), int(rows.loss_mask.sum() - padding.sum())
    assert 0 < content < learnt
    weights = objective.weights(batch)
    assert (weights["tokens"], weights["content"], weights["learnt"]) == (content, content, learnt)
    assert (batch["targets"] == objective.data.tokenizer.pad).any(), "padding stays in the numerator"
    loss = objective.loss(batch)["bound"].sum / content
    (padded,) = (objective.figures(loss, weights)[name] for name in ("loss_padded",))
    assert float(padded) == pytest.approx(float(loss) * content / learnt)
    found = objective.evaluate(4)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    held_out = objective.data.evaluation(np.arange(4))  # eval.sequences
    assert found["loss"] / found["loss_padded"] == pytest.approx(held_out.loss_mask.sum() / held_out.content.sum())


def test_a_run_with_an_older_lock_keeps_its_divisor(world: Any, tmp_path: Path) -> None:
    recipe = world.recipe(*RECORDS, *HDP)
    lock = {"recipe": recipe.model_dump(mode="json"), "recipe_name": "problems-hdp", "run_id": "x"}
    assert locked_recipe(tmp_path, lock).recipe.hierarchical_diffusion.loss_per == "content"
    del lock["recipe"]["hierarchical_diffusion"]["loss_per"]
    older = locked_recipe(tmp_path, lock).recipe
    assert older.hierarchical_diffusion.loss_per == "learnt"
    world.recipe = lambda *_: older
    with RunDirectory(tmp_path / "run") as run:
        objective = world.trainer(run).objective
    weights = objective.weights(objective.batch(np.arange(4)))
    assert weights["tokens"] == weights["learnt"] > weights["content"]
    found = objective.evaluate(4)
    assert found["loss_content"] > found["loss"], "the loss per content token is reported beside it"


def test_both_losses_are_logged(world: Any, tmp_path: Path) -> None:
    trainer = world.run(tmp_path / "run", *RECORDS, *HDP, "train.steps=2", "eval.every=1")
    events = [event for event in trainer.monitor.view.events if event["type"] in ("step", "eval")]
    assert {event["type"] for event in events} == {"step", "eval"}
    assert all(event["loss"] > event["loss_padded"] > 0 for event in events)
