"""Questions to runs, bases and adapters: which are asked, how they are answered, and how answers are scored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from finetuning import Tuning
from redline.errors import UsageError, UserError
from redline.evaluate.opened_run import open_pretrained, open_run
from redline.evaluate.questions import AnswerResults, score_answers
from redline.jobs.objective import Answer, Question
from redline.kernels.attention import Attention, Bound, MaskSpec
from redline.models import generate as generation
from redline.models.decoder import Decoder
from redline.models.generate import generate, greedy_answers
from redline.planning.shapes import DecoderShape
from redline.recipe.lock import make_lock, write_lock

VOCAB = 90


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """A decoder with weights large enough that its greedy texts do not loop."""
    shape = DecoderShape(3, 32, 4, 2, 8, 64, 96, tied=False)
    model = Decoder(shape, attention=Attention("flash", MaskSpec(), "cpu"))
    model.initialise(torch.Generator().manual_seed(3))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 8
    return model.eval()


def prompts_of(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=chance).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=chance).tolist() for length in lengths]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_side_by_side_is_one_by_one(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, seed: int, rows: int) -> None:
    monkeypatch.setattr(generation, "_MOST_ROWS", rows)
    prompts, stops = prompts_of(seed, 11), set(range(8))
    progress_calls: list[int] = []
    answers = greedy_answers(decoder, prompts, tokens=25, vocab=VOCAB, stop=stops, progress=progress_calls.append)
    for prompt, written in zip(prompts, answers, strict=True):
        alone = generate(decoder, prompt, count=1, tokens=25, vocab=VOCAB, seed=0, stop=stops, temperature=0)[0]
        assert written.tokens == alone
        assert written.ended == (len(alone) < 25)
    assert progress_calls == list(range(1, 12))
    assert len({len(one.tokens) for one in answers}) > 2, "some must end early for this to mean anything"


def test_a_model_ends_where_its_context_does(decoder: Decoder) -> None:
    prompts = [[5] * 7, [6] * 10, [7] * 12]
    answers = greedy_answers(decoder, prompts, tokens=25, vocab=VOCAB, stop=(), longest=10)
    assert [len(one.tokens) for one in answers] == [3, 0, 0]
    assert not any(one.ended for one in answers)
    assert greedy_answers(decoder, [], tokens=5, vocab=VOCAB, stop=()) == []


def test_memory_is_bounded(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_MOST_TOKENS", 100)
    lengths = [3, 30, 10, 10, 20, 80, 1]
    groups = list(generation._batches_by_length(lengths, 10))
    assert sorted(place for group in groups for place in group) == list(range(7))
    assert all(len(group) == 1 or len(group) * (max(lengths[p] for p in group) + 10) <= 100 for group in groups)
    assert len(groups) < 7


# --- scores


class Canned:
    """An objective with prepared answers: question → (reference, answer)."""

    def __init__(self, answers: dict[str, tuple[str, str]]) -> None:
        self.answers = answers

    def select_questions(self, count: int | None) -> None:
        self.answers = dict(list(self.answers.items())[:count])

    def questions(self) -> list[Question]:
        return [Question(text, [1], reference) for text, (reference, _) in self.answers.items()]

    def evaluate(self, micro: int) -> dict[str, float | None]:
        return {"loss": 1.5}

    def answer(self, questions: Sequence[Question], tokens: int, progress: Callable[[int], None]) -> list[Answer]:
        progress(len(questions))
        return [Answer(self.answers[question.text][1], ended=question.text != "c") for question in questions]


def results(kind: str, answers: dict[str, tuple[str, str]], count: int | None = None) -> AnswerResults:
    canned: Any = Canned(answers)
    return score_answers(canned, kind, micro=1, count=count, tokens=9, where="here")


def test_marks() -> None:
    answers = {
        "a": ("6 * 7 = 42\n#### 42", "It is 42."),
        "b": ("#### 1,000", "#### 1000"),
        "c": ("#### 3", "so 3 and then"),
        "d": ("#### 4", "#### 5"),
    }
    result = results("gsm8k", answers)
    metrics = result.result()
    assert metrics.pop("answers_per_s") > 0
    lm_eval = {"strict_match": 0.25, "flexible_extract": 0.75}
    assert metrics == {"loss": 1.5, "exact_match": 0.75, **lm_eval, "questions": 4, "right": 3, "cut": 1}
    assert [one.question for one in result.wrong(3)] == ["d"]
    assert results("gsm8k", answers, count=2).result()["questions"] == 2
    words = {"a": ("The red stone.", "red stone"), "b": ("the grey river", "a grey king"), "c": ("x", "y")}
    assert results("match", words).result()["exact_match"] == pytest.approx(1 / 3)
    metrics = results("f1", words).result()
    assert metrics["f1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert (metrics["exact_match"], metrics["right"]) == (pytest.approx(1 / 3), 1)


def test_nothing_to_mark() -> None:
    with pytest.raises(UserError, match=r"no question is held out.*--data"):
        results("match", {})
    with pytest.raises(UserError, match="--answers match or f1"):
        results("gsm8k", {"a": ("blue", "blue")})


# --- a run's questions


@pytest.fixture
def tuning(world: Any, tiny_base: Path, answers: Path, tmp_path: Path) -> Tuning:
    return Tuning(world, tiny_base, answers, tmp_path)


def questions_of(objective: Any, count: int | None = None) -> list[Question]:
    objective.select_questions(count)
    return list(objective.questions())


def test_what_is_held_out_is_asked(tuning: Tuning, answers: Path) -> None:
    rows = {row["prompt"]: row["completion"] for row in map(json.loads, answers.read_text().splitlines())}
    objective = tuning.objective("data.val_fraction=0.3")
    data = objective.data.answers
    questions = questions_of(objective)
    assert 3 < len(questions) == len(data.val.samples) < len(rows) / 2
    assert {one.text: one.reference for one in questions}.items() <= rows.items()
    learnt = [data.tokenizer.decode(data.train.samples[place][0]) for place in range(len(data.train.samples))]
    assert [one.text for one in questions if any(one.text in text for text in learnt)] == []
    assert questions_of(tuning.objective("data.val_fraction=0.3"), 3)[0] in questions
    assert len(questions_of(tuning.objective("data.val_fraction=0.3"), 3)) == 3
    for option in ("finetune.learn=all", "data.pack=false"):
        again = questions_of(tuning.objective("data.val_fraction=0.3", option))
        assert {one.text: one.prompt for one in again} == {one.text: one.prompt for one in questions}
    assert questions_of(tuning.objective("data.val_fraction=0")) == []


def test_half_an_answer_is_no_reference(tuning: Tuning, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}.", "completion": "red " * (3 if n % 2 else 90)} for n in range(40)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (f"data.source={tmp_path / 'long.jsonl'}", "finetune.overlong=cut", "data.val_fraction=0.5")
    objective = tuning.objective(*options)
    assert objective.data.held_out.samples.length.max() == 96, "some are cut"
    assert {one.reference for one in questions_of(objective)} == {"red " * 3}


def test_the_loss_is_of_the_rows_that_are_asked(tuning: Tuning) -> None:
    objective = tuning.objective("data.val_fraction=0.3", "finetune.method=lora", "model.quant=none")
    found = score_answers(objective, "match", micro=2, count=4, tokens=2, where="here")
    tokenizer, total, count = objective.tokenizer, 0.0, 0
    for one in objective.questions():
        answer = tokenizer._backend.encode(one.reference + "<|im_end|>", add_special_tokens=False).ids
        row = torch.tensor([one.prompt + answer])
        with torch.no_grad():
            hidden = objective.model.eval()(row[:, :-1], Bound(), objective.model.new_cache())
        picked = objective.model.logits(hidden)[0].log_softmax(-1).gather(1, row[0, 1:, None])[-len(answer) :]
        total, count = total - picked.sum().item(), count + len(answer)
    assert found.result()["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found.result()["questions"] == 4


# --- models that are no run


@pytest.fixture(scope="module")
def rows(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the questions, and one that is longer than the sequences of the run."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    long = {"prompt": "Which of the stones is it? " * 9, "completion": "It is red."}
    path.write_text("".join([json.dumps(long) + "\n", *answers.read_text().splitlines(keepends=True)[:9]]))
    return path


def answers_of(opened: Any, tokens: int = 12) -> list[str]:
    questions = questions_of(opened.objective)
    return [one.text for one in opened.objective.answer(questions, tokens)]


def test_a_base_answers_as_transformers_does(tiny_base: Path, rows: Path, fp32: None) -> None:
    from transformers import AutoModelForCausalLM

    opened = open_pretrained(str(tiny_base), source=str(rows), device="cpu")
    assert (opened.step, opened.weights) == (None, "base")
    theirs = AutoModelForCausalLM.from_pretrained(tiny_base)
    objective: Any = opened.objective
    assert not any(parameter.requires_grad for parameter in objective.model.parameters())
    questions = questions_of(objective)
    assert len(questions[0].prompt) > 100
    assert questions[0].text.startswith("Which of the stones"), "all rows, in their order"
    assert len(questions) == 10
    no_tokens = list(range(objective.data.facts.vocab_size, 320))
    greedy = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": no_tokens}
    for one, found in zip(questions, objective.answer(questions, 12), strict=True):
        made = theirs.generate(torch.tensor([one.prompt]), **greedy)[0, len(one.prompt) :]
        assert found.text == objective.tokenizer.decode(made.tolist(), special=False)
        assert found.ended == (made[-1] == 1)


@pytest.fixture
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate in fp32, whichever precision is fastest on this CPU."""
    from redline.hardware.machine import Machine

    monkeypatch.setattr("redline.evaluate.opened_run.detect_machine", lambda *_: Machine("cpu", "a CPU", 8 << 30, 2))


@pytest.fixture(scope="module")
def foreign(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an adapter with PEFT: on some matrices, named by a regular expression, with large weights."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("foreign")
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=r".*\.(q_proj|o_proj|up_proj)", use_rslora=True)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_base), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.5)
    model.save_pretrained(folder)
    return folder


def test_an_adapter_of_peft(foreign: Path, tiny_base: Path, fp32: None) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    opened = open_pretrained(str(foreign), writes_only=True, device="cpu")
    assert opened.weights == "adapter"
    assert str(tiny_base) in opened.title
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base), foreign).eval()
    tokens = torch.randint(0, 320, (2, 30))
    model: Any = opened.objective.model
    with torch.no_grad():
        ours = model.logits(model(tokens, Bound(), model.new_cache()))
        expected = theirs(tokens).logits
        plain = theirs.unload()(tokens).logits
    assert (ours - expected).abs().max() < 1e-4 < (expected - plain).abs().max()


def test_an_exported_run_answers_as_the_run_does(tuning: Tuning, rows: Path, tmp_path: Path, fp32: None) -> None:
    from redline.export.folder import export_run

    run = tmp_path / "run"
    trainer = tuning.run(run, "train.lr=5e-2", "train.steps=12")
    write_lock(run, make_lock("tune", "0", trainer.resolved, trainer.objective.data.facts))
    export_run(run, None, tmp_path / "adapter")
    of_run = answers_of(open_run(run, source=str(rows), device="cpu"))
    adapter: Any = open_pretrained(str(tmp_path / "adapter"), source=str(rows), device="cpu")
    assert adapter.objective.recipe.model.quant == "nf4"
    of_base = answers_of(open_pretrained(str(tuning.base), source=str(rows), device="cpu"))
    assert len(of_run) == 10, "long rows too"
    assert of_run == answers_of(adapter) != of_base
    origin = json.loads((tmp_path / "adapter" / "redline.json").read_text())
    assert origin["quantisation"]["type"] == "nf4"
    origin["quantisation"] = None
    (tmp_path / "adapter" / "redline.json").write_text(json.dumps(origin))
    model: Any = open_pretrained(str(tmp_path / "adapter"), writes_only=True, device="cpu").objective.model
    assert model.get_submodule("blocks.0.mlp.up").base.quantised == []
    origin["base"]["fingerprint"] = "another"
    (tmp_path / "adapter" / "redline.json").write_text(json.dumps(origin))
    with pytest.raises(UserError, match="adapter: was not trained on the base"):
        open_pretrained(str(tmp_path / "adapter"), writes_only=True, device="cpu")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "IA3"}, "is a IA3 adapter; redline reads LORA"),
        ({"use_dora": True}, "has use_dora=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"bias": "all"}, "bias='all'"),
        ({"r": 5}, r"\[5, 64\].*--base"),
        ({"base_model_name_or_path": None}, "--base PATH"),
        ({"base_model_name_or_path": "/no/such"}, "its base /no/such: no such file"),
    ],
)
def test_adapters_that_are_refused(foreign: Path, tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(foreign, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=sentence):
        open_pretrained(str(folder), writes_only=True, device="cpu")


def test_an_adapter_whose_base_moved(foreign: Path, tiny_base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(foreign, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/no/such"}))
    opened = open_pretrained(str(folder), base=str(tiny_base), writes_only=True, device="cpu")
    assert opened.weights == "adapter"
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors"):
        open_pretrained(str(folder), writes_only=True, device="cpu")
    with pytest.raises(UsageError, match="--base is for an adapter"):
        open_pretrained(str(tiny_base), base=str(tiny_base), writes_only=True, device="cpu")
