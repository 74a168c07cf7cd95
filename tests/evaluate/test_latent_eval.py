"""Commands on a latent_prefix run: eval under every condition, sample, and both with one of its models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from latents import Latents, other_base, piece_base
from redline.cli.main import app
from redline.evaluate.opened_run import open_run
from redline.jobs.latent_prefix import objective as latent_prefix
from redline.jobs.latent_prefix.costs import BITS
from redline.jobs.latent_prefix.data import Pair
from redline.jobs.latent_prefix.evaluate import Comparison, _all_slots, _answer_metrics, compare
from redline.jobs.latent_prefix.objective import answer_from_latents, answer_from_prompts
from redline.jobs.objective import Answer

pytest.importorskip("transformers", reason="bases are made by transformers")
CONDITIONS = ["text", "latent", "budget", "no_context", "other", "latent int8", "latent int4"]


def squad(path: Path) -> Path:
    articles = []
    for number in range(30):
        qas = [{"id": str(q), "question": f"Who is {q}?", "answers": [{"text": f"name {q}"}]} for q in range(3)]
        paragraph = {"context": f"In article {number} name 0, name 1 and name 2 are told of.", "qas": qas}
        articles.append({"title": f"article {number}", "paragraphs": [paragraph]})
    path.write_text(json.dumps({"data": articles}))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two steps with two frozen models that have different tokenizers."""
    folder = tmp_path_factory.mktemp("latent")
    bases = [
        other_base(folder / "base1", seed=1, spread=0.2),
        piece_base(folder / "base2", seed=2, spread=0.2),
    ]
    recipe = Latents(SimpleNamespace(), bases, squad(folder / "squad.json"), folder)
    words = ["train", str(recipe.file), "train.steps=2", "eval.samples=1", "--run", str(folder / "run")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return folder / "run"


Typed = Callable[..., str]


@pytest.fixture
def typed() -> Typed:
    def call(*words: str, fails: bool = False) -> str:
        done = CliRunner().invoke(app, [*words])
        assert (done.exit_code != 0) == fails, done.output + repr(done.exception)
        return done.stdout if not fails else done.output + str(done.exception)

    return call


def test_eval_reports_every_condition(run: Path, typed: Typed) -> None:
    result = json.loads(
        typed("eval", str(run), "--answers", "f1", "--questions", "6", "--tokens", "4", "--json").splitlines()[-1]
    )
    assert (result["questions"], list(result["models"])) == (6, ["0", "1"])
    for one in result["models"].values():
        assert list(one["conditions"]) == CONDITIONS
        for figures in one["conditions"].values():
            assert set(figures) == {"exact_match", "f1", "nll", "first_top1", "first_top5"}
            assert 0 <= figures["exact_match"] <= figures["f1"] <= 1
            assert figures["first_top1"] <= figures["first_top5"]
        assert one["prefix"] == 4 < one["prompt_tokens"]
        latent, int8, int4 = (one["conditions"][name]["nll"] for name in ("latent", "latent int8", "latent int4"))
        assert abs(latent - int8) < abs(latent - int4) + 1e-3 < 1.0
    latent_sizes = result["wire"]
    assert (latent_sizes["fp16"], latent_sizes["int8"], latent_sizes["int4"]) == (128, 68, 36)
    assert latent_sizes["larger_than_text"] == {"fp16": True, "int8": True, "int4": False}
    assert latent_sizes["int8"] > latent_sizes["utf8"] == 64 > latent_sizes["int4"], "as much as the encoder reads"
    assert -1 <= result["latent_cosine"] <= 1
    shown = typed("eval", str(run), "--answers", "match", "--questions", "2", "--tokens", "2")
    assert "larger than the text" in shown
    assert "smaller than the text" in shown
    assert "collapse" in shown


def test_conditions_use_the_right_prompts(run: Path) -> None:
    """Prompts hold the text, its first M tokens, or the question; likelihoods equal a forward pass of each row."""
    objective: Any = open_run(run, device="cpu").objective
    result = compare(objective, count=3, tokens=3, where="a run").models["1"]["conditions"]
    llm, pairs = objective.frozen["1"], objective.held_out_pairs()[:3]
    reader, decoder = llm.tokenizer, llm.decoder
    prompts = {
        "text": [reader.prompt(pair.text) for pair in pairs],
        "budget": [[*reader.begin, *reader.prompt(pair.text)[1:5], *reader.anchor] for pair in pairs],
        "no_context": [reader.prompt(pair.question) for pair in pairs],
    }
    assert reader.begin == [1]
    for name, some in prompts.items():
        total, count = 0.0, 0
        for prompt, pair in zip(some, pairs, strict=True):
            answer = reader.answer(pair.answers[0])
            tokens = torch.tensor([[*prompt, *answer[:-1]]])
            with torch.no_grad():
                logs = decoder.logits(decoder(tokens, decoder.attention.bind(tokens.shape[1]))).log_softmax(-1)[0]
            total -= sum(logs[len(prompt) - 1 + t, token].item() for t, token in enumerate(answer))
            count += len(answer)
        assert result[name]["nll"] == pytest.approx(total / count, rel=1e-4), name


def test_answers_from_a_prefix_are_those_from_tokens(run: Path) -> None:
    """A prefix that equals the embeddings of tokens gets the same answer as the tokens."""
    objective: Any = open_run(run, device="cpu").objective
    llm = objective.frozen["0"]
    tokens = [5, 9, 30, 7]
    embedded = llm.decoder.embed(torch.tensor([tokens]))
    objective.model.prefix = lambda name, z: z
    from_prefix = answer_from_latents(objective, "0", embedded, 6)
    from_tokens = answer_from_prompts(llm, [[*llm.tokenizer.begin, *tokens, *llm.tokenizer.anchor]], 6)
    assert from_prefix == from_tokens


def test_a_sample_shows_both_answers_of_each_model(run: Path, typed: Typed) -> None:
    shown = typed("sample", str(run), "--prompt", "Question: Who is 1?\nContext: name 1.", "--tokens", "4")
    assert shown.count("from latents:") == shown.count("from the text:") == 2
    assert "Question: Who is 1?" in shown
    assert "--prompt" in typed("sample", str(run), fails=True)


def test_one_model_can_be_used_without_the_other(run: Path, typed: Typed, tmp_path: Path) -> None:
    both = typed("sample", str(run), "--prompt", "Who?", "--tokens", "4", "--temperature", "0")
    first = run.parent / "base1"
    shutil.move(first, tmp_path / "away")
    try:
        alone = typed("sample", str(run), "--prompt", "Who?", "--tokens", "4", "--temperature", "0", "--set", "only=1")
        figures = json.loads(
            typed("eval", str(run), "--set", "only=1", "--answers", "f1", "--questions", "2", "--json").splitlines()[-1]
        )
        typed("sample", str(run), "--prompt", "Who?", fails=True)
    finally:
        shutil.move(tmp_path / "away", first)
    assert alone.splitlines()[-2:] == both.splitlines()[-2:]
    assert list(figures["models"]) == ["1"]
    assert "0, 1" in typed("sample", str(run), "--prompt", "Who?", "--set", "only=2", fails=True)


def test_rows_can_be_previewed(run: Path, typed: Typed) -> None:
    shown = typed("train", str(run.parent / "latent-2.yaml"), "train.steps=2", "--preview", "2")
    assert shown.count("text 1: ") == 1
    assert "→ [[name " in shown
    assert "training rows" in shown


def test_a_preview_passes_messages_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a base may unpack it, which takes a while; the user sees the message, as in training."""
    plain = latent_prefix.complete

    def telling(recipe: Any, say: Callable[[str], None]) -> Any:
        say("unpacking a base once")
        return plain(recipe, say)

    monkeypatch.setattr(latent_prefix, "complete", telling)
    words = ["train", str(run.parent / "latent-2.yaml"), "train.steps=2", "--preview", "2"]
    assert "unpacking a base once" in CliRunner().invoke(app, words).stderr


def test_latents_are_compared_with_the_part_of_the_text_that_is_read(run: Path) -> None:
    """The rest of the text does not count, and the private slots of every model do."""
    objective: Any = open_run(run, device="cpu").objective
    objective.options = objective.options.model_copy(update={"bytes": 16})
    result = compare(objective, count=3, tokens=2, where="a run")
    whole = sum(len(pair.text.encode()) for pair in objective.held_out_pairs()[:3]) / 3
    assert result.latent_sizes["utf8"] == 16
    assert result.latent_sizes["unread"] == pytest.approx(whole - 16)
    assert any(f"{whole - 16:.0f} bytes" in line for line in result.lines())
    shared, private = torch.zeros(2, 3, 8), torch.ones(2, 5, 8)
    assert _all_slots({"0": shared, "1": private}, 2).shape == (3 + 2, 8)


def test_answers_are_compared_as_numbers_or_as_words() -> None:
    said, pairs = [Answer("5", True, 1)], [Pair("two minus seven", "", ("-5",), "a group")]
    assert _answer_metrics(said, pairs, numbers=False)["exact_match"] == 1.0, "by words, without punctuation"
    result = _answer_metrics(said, pairs, numbers=True)
    assert (result["exact_match"], result["strict_match"], result["flexible_extract"]) == (0.0, 0.0, 0.0)
    two = [Pair("four plus one", "", ("five", "5"), "a group")]
    result = _answer_metrics([Answer("So #### 5 it is.", True, 1)], two, numbers=True)
    assert (result["exact_match"], result["strict_match"], result["flexible_extract"]) == (1.0, 1.0, 1.0)
    conditions = {"latent": {**result, "nll": None, "first_top1": 0.5, "first_top5": 1.0}}
    model = {"title": "one", "conditions": conditions, "prompt_tokens": 8.0, "prefix": 2}
    latent_sizes = {"utf8": 4.0, "gzip": 4.0, "unread": 0.0, **dict.fromkeys(BITS, 4)}
    header, row = Comparison({"0": model}, latent_sizes, None, 1, 1.0).lines()[1:3]
    assert header.split() == ["EM", "strict", "flexible", "F1", "NLL/token", "top-1", "top-5"]
    assert row.split()[:4] == ["latent", "1.000", "1.000", "1.000"]
