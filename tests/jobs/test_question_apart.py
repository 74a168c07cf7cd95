"""latent_prefix with question_aware=false: the encoder reads the context, and the model the question after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from latents import Latents, other_base
from redline.errors import RecipeError, UserError
from redline.jobs.latent_prefix.data import read_pairs, separate
from redline.jobs.latent_prefix.evaluate import compare
from redline.jobs.latent_prefix.objective import answer_from_latents
from redline.jobs.latent_prefix.teacher import text_prompt
from redline.kernels.cross_entropy import IGNORE

pytest.importorskip("transformers", reason="bases are made by transformers")
APART = ("latent_prefix.question_aware=false", "data.seq_len=80", "latent_prefix.bytes=96", "data.val_fraction=0.4")


def write_rows(path: Path, contexts: int = 12) -> Path:
    """Write questions of three lengths about each context."""
    rows = [
        {
            "question": f"Which{' colour' * much}?",
            "context": f"Number {n} is red or blue.",
            "answer": ("red", "blue")[n % 2],
        }
        for n in range(contexts)
        for much in (1, 2, 9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def two(world: Any, tiny_base: Path, tmp_path: Path) -> Latents:
    bases = [tiny_base, other_base(tmp_path / "second", spread=0.2)]
    return Latents(world, bases, write_rows(tmp_path / "rows.jsonl"), tmp_path)


def stirred(objective: Any) -> Any:
    """Make prefixes differ: those of an untrained adapter hardly change a model's predictions."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return objective


def test_states_after_questions_of_several_lengths_are_those_of_single_rows(two: Latents) -> None:
    """The reference has one row, without padding: begin, prefix, question, anchor, answer."""
    objective = stirred(two.objective(*APART, teach=False))
    batch = objective.batch(np.arange(8))
    pairs, numbers = objective.data.pairs, objective.data.pairs.index.sequences(np.arange(8)).tolist()
    for name, llm in objective.frozen.items():
        targets, asked = batch[f"targets.{name}"], batch[f"asked.{name}"]
        assert len(set((asked != IGNORE).sum(1).tolist())) > 1, "the questions differ in length"
        prefix = objective.model.prefix(name, objective.model.latents(batch["bytes"])[name])
        states = llm.states(prefix, targets, asked)
        for row, number in enumerate(numbers):
            question = llm.tokenizer.question(pairs.train.pairs[number].asked)
            answer = pairs.train.answers[int(name)][number]
            ids = torch.tensor([[*question, *llm.tokenizer.anchor, *answer[:-1]]])
            begin = llm.decoder.embed(llm.begin)[None]
            read = torch.cat((begin, prefix[row : row + 1], llm.decoder.embed(ids)), 1)
            alone = llm.decoder(read, llm.decoder.attention.bind(read.shape[1]))[0, -len(answer) :]
            torch.testing.assert_close(states[row, : len(answer)], alone, rtol=1e-4, atol=1e-4)


def test_latents_do_not_depend_on_the_question_and_answers_do(two: Latents) -> None:
    pairs, _ = read_pairs(str(two.rows), question_aware=False)
    aware, _ = read_pairs(str(two.rows))
    assert {pair.text for pair in pairs} == {f"Context: Number {n} is red or blue.\n" for n in range(12)}
    assert [one.question + pair.text for one, pair in zip(aware, pairs, strict=True)] == [one.text for one in aware]
    assert all(pair.asked == pair.question and not one.asked for pair, one in zip(pairs, aware, strict=True))
    assert len({pair.key() for pair in pairs}) == len(pairs)
    objective = stirred(two.objective(*APART, teach=False))
    z = objective.encode([pairs[0].text] * 3)["1"]
    assert torch.equal(z[0], z[1])
    several = answer_from_latents(objective, "1", z, 6, asked=[pair.asked for pair in pairs[:3]])
    single = [answer_from_latents(objective, "1", z[:1], 6, asked=[pair.asked])[0] for pair in pairs[:3]]
    assert several == single, "rows of other lengths in the batch change nothing"


def test_the_teacher_reads_the_question_after_the_text(two: Latents) -> None:
    objective = two.objective(*APART)
    llm, pair = objective.frozen["1"], objective.data.pairs.train.pairs[0]
    reader = llm.tokenizer
    assert text_prompt(llm, pair.text, 10**6, asked=pair.asked) == [
        *reader.begin,
        *reader.question(pair.text),
        *reader.question(pair.asked),
        *reader.anchor,
    ]
    short = text_prompt(llm, pair.text, 40, asked=pair.asked)
    tail = len(reader.question(pair.asked)) + len(reader.anchor)
    assert len(short) == 40, "a long text loses its end, never the question"
    assert short[-tail:] == [*reader.question(pair.asked), *reader.anchor]
    answer = objective.data.pairs.train.answers[1][0]
    tokens = torch.tensor([[*text_prompt(llm, pair.text, 10**6, asked=pair.asked), *answer[:-1]]])
    states = llm.decoder(tokens, llm.decoder.attention.bind(tokens.shape[1]))[0, -len(answer) :][:4]
    cached = objective.teachers["1"].states(np.array([0]))[0, : len(states)]
    torch.testing.assert_close(cached, states, rtol=1e-4, atol=1e-4)


def test_a_run_learns_and_every_condition_keeps_the_question(two: Latents, tmp_path: Path) -> None:
    trainer = two.run(tmp_path / "run", "train.steps=3", *APART)
    assert trainer.state.step == 3
    objective = stirred(trainer.objective)
    result = compare(objective, count=4, tokens=3, where="a run").models["1"]["conditions"]
    llm, pairs = objective.frozen["1"], objective.held_out_pairs()
    reader, total, count = llm.tokenizer, 0.0, 0
    for pair in pairs:
        start = [*reader.begin, *reader.question(pair.text)[:4], *reader.question(pair.asked), *reader.anchor]
        answer = reader.answer(pair.answers[0])
        tokens = torch.tensor([[*start, *answer[:-1]]])
        with torch.no_grad():
            logs = llm.decoder.logits(llm.decoder(tokens, llm.decoder.attention.bind(tokens.shape[1]))).log_softmax(-1)
        total -= sum(logs[0, len(start) - 1 + t, token].item() for t, token in enumerate(answer))
        count += len(answer)
    assert result["budget"]["nll"] == pytest.approx(total / count, rel=1e-4)
    assert result["other"]["nll"] != result["latent"]["nll"]


def test_a_text_without_a_question_is_refused(two: Latents, tmp_path: Path) -> None:
    assert separate("Context: Ann left.\nQuestion: Who?\n") == ("Context: Ann left.\n", "Question: Who?\n")
    for text in ("Ann left.\n", "Context: a\nQuestion: b?\nmore\n"):
        with pytest.raises(UserError):
            separate(text)
    with pytest.raises(UserError):
        read_pairs("problems:easy:5", question_aware=False)
    (tmp_path / "whole.jsonl").write_text(json.dumps({"source": "a. Who?", "answer": "b"}) + "\n")
    with pytest.raises((UserError, RecipeError)):
        read_pairs(str(tmp_path / "whole.jsonl"), question_aware=False)
