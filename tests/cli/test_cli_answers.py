"""Fine-tuning from the command line: previews, evaluation of answers, and models that are not runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUESTION = "What is the colour of the stone number 3?"
TUNED = """
objective: finetune
model: {base: BASE}
data: {source: ROWS, seq_len: 128, val_fraction: 0.2}
finetune: {method: full}
train: {device: cpu, precision: fp32, lr: 3e-3, steps: 120, global_batch: 8}
eval: {every: 1000, samples: 0}
checkpoint: {every: 1000}
"""
Redline = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(redline: Redline, tiny_base: Path, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with rows, a recipe for them, and the run runs/tuned that was trained on them."""
    place = tmp_path_factory.mktemp("tuned")
    (place / "rows.jsonl").write_text(answers.read_text())
    (place / "tune.yaml").write_text(TUNED.replace("BASE", str(tiny_base)).replace("ROWS", "rows.jsonl"))
    done = redline("train", "tune.yaml", "--run", "runs/tuned", cwd=place)
    assert done.code == 0, done.err
    (place / "err.txt").write_text(done.err)
    return place


def score(answer: Any) -> dict[str, Any]:
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return found


# --- what would be learnt


def test_a_preview_shows_what_is_learnt_and_trains_nothing(
    inside: Redline, folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        (folder / "rows.jsonl").read_text()
        + json.dumps({"prompt": "And?", "completion": " "})
        + "\n"
        + json.dumps({"prompt": "Long?", "completion": "red " * 200})
        + "\n"
    )
    (tmp_path / "tune.yaml").write_text((folder / "tune.yaml").read_text())
    shown = inside("train", "tune.yaml", "--preview", "2")
    assert shown.code == 0, shown.err
    assert shown.out.count("[[It is ") == 2
    assert "<|im_start|>user\nWhat is the colour of the " in shown.out
    assert "42, 1 of them bad (1 empty 'completion')" in shown.out
    assert "rows.jsonl:41: empty 'completion'" in shown.out
    assert "1 overlong: 0 cut, 1 dropped" in shown.out
    assert " of them in the loss (" in shown.out
    assert ", filled to " in shown.out
    assert "template     the model's own" in shown.out
    assert not (tmp_path / "runs").exists()


def test_a_preview_of_running_text(inside: Redline, recipe: str, corpus: Path, tmp_path: Path) -> None:
    shown = inside("train", recipe, "--preview", "3")
    assert shown.code == 0, shown.err
    assert [f"document {number}: " in shown.out for number in (1, 2, 3, 4)] == [True, True, True, False]
    first = (corpus / "000.txt").read_text().splitlines()[0]
    assert "│".join(first) in shown.out
    (tmp_path / "train.bin").write_bytes(bytes(4000))
    refused = inside("train", recipe, "data.source=train.bin", "--preview", "3")
    assert refused.code == 2
    assert "redline prepare" in refused.message
    assert "redline prepare" in refused.message


@pytest.mark.parametrize("other", [("--resume", "latest"), ("--sweep", "train.lr=1,2")])
def test_a_preview_is_of_one_recipe(inside: Redline, other: tuple[str, str]) -> None:
    refused = inside("train", "--preview", "3", *other)
    assert refused.code == 2
    assert "--preview" in refused.message


# --- what was learnt


def test_before_and_after(inside: Redline, folder: Path, tiny_base: Path) -> None:
    data = ("--answers", "match", "--data", "rows.jsonl", "--json")
    before, after = (score(inside("eval", model, *data, cwd=folder)) for model in (str(tiny_base), "tuned"))
    assert (before["right"], before["step"], before["weights"]) == (0, None, "base")
    assert (before["questions"], after["questions"]) == (40, 40)
    assert after["right"] > 30
    assert after["exact_match"] == after["right"] / 40
    assert after["loss"] < 0.3 * before["loss"]
    assert [set(one) for one in before["wrong"]] == [{"question", "reference", "answer"}] * 3


def test_held_out_rows(inside: Redline, folder: Path) -> None:
    answer = inside("eval", "tuned", "--answers", "f1", "--questions", "3", "--tokens", "2", cwd=folder)
    assert answer.code == 0, answer.err
    values = dict(line.split() for line in answer.out.splitlines()[1:] if len(line.split()) == 2)
    assert (values["questions"], values["cut"], values["right"]) == ("3", "3", "0")
    assert 0 < float(values["f1"]) < 1, "It is …"
    assert answer.out.startswith("runs/tuned at step 120 (raw weights)\n")
    assert answer.out.count("  question  What is the colour of the ") == 3
    assert answer.out.count("  expected  It is ") == 3
    assert "answered 3 questions in" in answer.err


def test_what_comes_next_can_be_typed(folder: Path) -> None:
    said = (folder / "err.txt").read_text()
    assert "redline sample runs/tuned --prompt 'a question'" in said
    assert "redline eval runs/tuned@best --answers match" in said


def test_writing(inside: Redline, folder: Path, tiny_base: Path) -> None:
    words = ("--prompt", QUESTION, "--temperature", "0", "--tokens", "12")
    assert inside("sample", "tuned", *words, cwd=folder).out == f"{QUESTION}\nIt is grey.\n"
    bare = inside("sample", "tuned", *words, "--plain", "--json", cwd=folder)
    assert "It is grey" not in str(score(bare)["samples"])
    base = score(inside("sample", str(tiny_base), *words, "--json", cwd=folder))
    assert (base["step"], base["weights"]) == (None, "base")
    assert "It is grey" not in str(base["samples"])


def test_a_plain_prompt_is_not_put_into_the_chat_template(inside: Redline, folder: Path) -> None:
    """A model trained on answers continues with one if the prompt holds the chat up to its answer."""
    chat = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    written = inside("sample", "tuned", "--prompt", chat, "--plain", "--temperature", "0", "--json", cwd=folder)
    assert score(written)["samples"] == [{"prompt": chat, "text": "It is grey."}]


# --- what cannot be


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("eval", "empty", "--data", "rows.jsonl"), "lock.json"),
        (("sample", "strange", "--prompt", "a"), "GPT2LMHeadModel"),
        (("eval", "rows.jsonl", "--data", "rows.jsonl"), "rows.jsonl"),
        (("eval", "no/model", "--data", "rows.jsonl"), "not in the hub's cache"),
        (("eval", "runs/slip", "--answers", "match"), "runs/slip"),
        (("eval", "--answers", "rouge"), "'rouge' is not gsm8k or match or f1"),
        (("eval", "--questions", "3"), "--answers"),
        (("eval", "--answers", "match", "--questions", "0"), "greater than or equal to 1"),
        (("eval", "strange", "--weights", "ema"), "--weights"),
    ],
    ids=str,
)
def test_mistakes(inside: Redline, models: Path, words: tuple[str, ...], sentence: str) -> None:
    answer = inside(*words, cwd=models)
    assert answer.code in (1, 2)
    assert sentence in " ".join(answer.message.replace("│", " ").split())


def test_a_model_needs_rows_and_a_question(inside: Redline, folder: Path, tiny_base: Path) -> None:
    alone = inside("eval", str(tiny_base), cwd=folder)
    assert (alone.code, "--data" in alone.message) == (2, True)
    silent = inside("sample", str(tiny_base), cwd=folder)
    assert (silent.code, "--prompt" in silent.message) == (2, True)
    numbers = inside("eval", "tuned", "--answers", "gsm8k", cwd=folder)
    assert (numbers.code, "reference answers has a number" in numbers.message) == (1, True)


def test_a_moved_base_can_be_given_on_the_command_line(
    inside: Redline, folder: Path, tiny_base: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(tiny_base, tmp_path / "moved")
    there, here = (
        score(inside("eval", "tuned", *words, "--json", cwd=folder)) for words in ((), ("--base", str(moved)))
    )
    assert here == there


def test_questions_are_not_reported_as_dropped_rows(inside: Redline, folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "What?", "completion": "red " * words} for words in (2, 60, 5000)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("eval", "tuned", "--answers", "match", "--data", str(tmp_path / "long.jsonl"), "--tokens", "2", "--json")
    found = score(inside(*words, cwd=folder))
    assert found["questions"] == 2
    (note,) = found["notes"]
    assert "3 rows, 2 can be asked; 1 are longer than" in note


def test_a_run_that_continues_texts(inside: Redline, home: Path) -> None:
    answer = inside("eval", "latest", "--answers", "match", cwd=home)
    assert answer.code == 2
    assert "is a causal_lm run: it continues texts, and answers no questions. Leave out --answers" in answer.message


# --- what a score was measured on


def test_the_score_warns_about_few_rows_and_training_rows(inside: Redline, folder: Path, tmp_path: Path) -> None:
    own = score(inside("eval", "tuned", "--json", cwd=folder))["held_out"]
    assert own["unit"] == "rows"
    assert own["few"]
    assert own["size"] < 30
    assert own["shared_with_training"] is None, "its own split is held out by construction"
    seen = score(inside("eval", "tuned", "--data", "rows.jsonl", "--json", cwd=folder))
    assert seen["held_out"]["shared_with_training"] == seen["held_out"]["size"] - own["size"]
    assert not seen["held_out"]["few"]
    assert any("training data" in warning for warning in seen["held_out"]["warnings"])
    shown = inside("eval", "tuned", "--answers", "match", "--data", "rows.jsonl", "--questions", "2", cwd=folder)
    said = [line for line in shown.out.splitlines() if "held out" in line]
    assert len(said) == 2
    assert "only 2 rows" in said[0]
    (folder / "new.jsonl").write_text('{"prompt": "Whose is the house?", "completion": "It is mine."}\n' * 2)
    new = score(inside("eval", "tuned", "--data", "new.jsonl", "--json", cwd=folder))["held_out"]
    assert (new["size"], new["shared_with_training"]) == (1, 0)


def test_rows_are_not_called_unseen_if_the_training_data_is_missing(
    inside: Redline, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "runs/tuned", tmp_path / "runs/tuned")
    lock = json.loads((tmp_path / "runs/tuned/lock.json").read_text())
    lock |= {"began_in": str(tmp_path)}
    (tmp_path / "runs/tuned/lock.json").write_text(json.dumps(lock))
    shutil.copy(folder / "rows.jsonl", tmp_path / "others.jsonl")
    found = score(inside("eval", "tuned", "--data", "others.jsonl", "--json"))
    assert found["held_out"]["shared_with_training"] is None
    assert any("training data" in warning for warning in found["held_out"]["warnings"])


def test_a_prompt_from_the_data_is_a_held_out_question(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.evaluate.opened_run import open_run

    monkeypatch.chdir(folder)
    objective = open_run(Path("runs/tuned")).objective
    prompt = objective.first_prompt()
    assert prompt in [one.text for one in objective.questions()]
    assert prompt.startswith("What is the colour of the ")
