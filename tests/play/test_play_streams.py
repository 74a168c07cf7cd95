"""What each job streams: the events add up to the text that `sample` writes with the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetuning import Tuning
from playing import ask, events_of
from redline.data.chat import ASSISTANT, SYSTEM, USER, Message
from redline.data.text_stream import TextStream
from redline.data.tokenizer import ByteTokenizer
from redline.errors import UserError
from redline.jobs.finetune.data import usual_system_prompt
from redline.jobs.objective import Objective, Sample, Sampling
from redline.jobs.streaming import Ask, Cells, Event, Finished, HeatMap, Section, Token, Unmasked
from redline.play.models import PlayModel


def of_kind(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.parametrize(("name", "panel"), [("text", "complete"), ("chat", "chat"), ("chat", "complete")])
def test_tokens_add_up_to_the_sampled_text(models: dict[str, PlayModel], name: str, panel: str) -> None:
    one, how = models[name], {"tokens": 12, "seed": 3, "temperature": 1.0}
    events = events_of(one, ask("What is the colour?", panel, alternatives=3), **how)
    (finished,) = of_kind(events, Finished)
    objective = one.opened.objective
    write = objective.continuation if panel == "complete" else objective.sample
    assert finished.text == write("What is the colour?", Sampling(**how))[0].text
    tokens = of_kind(events, Token)
    assert "".join(token.text for token in tokens) == finished.text
    counted = [token for token in tokens if token.logprob is not None]
    assert len(counted) == finished.tokens <= 12
    assert all(len(token.likeliest) == 3 and token.likeliest[0][1] >= token.logprob - 1e-5 for token in counted)
    (section,) = of_kind(events, Section)
    assert section.prompt_tokens >= 5
    assert json.dumps([event.as_dict() for event in events])


@pytest.mark.parametrize(("name", "panel"), [("blocks", "denoise"), ("plans", "answer")])
@pytest.mark.parametrize("sampler", ["first_hitting", "ancestral"])
def test_cells_add_up_to_the_sampled_text(models: dict[str, PlayModel], name: str, panel: str, sampler: str) -> None:
    one, how = models[name], {"tokens": 20, "seed": 3}
    events = events_of(one, ask("How many?", panel, choices={"sampler": sampler}), **how)
    titles = [section.title for section in of_kind(events, Section)]
    assert titles == ([""] if name == "blocks" else ["plan", "execution"])
    for cells in of_kind(events, Cells):
        passes = [one for one in of_kind(events, Unmasked) if one.section == cells.section]
        places = [place for one in passes for place in one.places]
        assert sorted(places) == list(range(sum(cells.blocks))), "every cell is filled once"
        assert all(p is None or 0 < p <= 1 for one in passes for p in one.probabilities)
        forwards = [one.forwards for one in passes]
        assert forwards == sorted(forwards)
    if sampler == "first_hitting":
        text = "\n".join(finished.text for finished in of_kind(events, Finished))
        assert text == one.opened.objective.sample("How many?", Sampling(**how))[0].text


def test_blocks_are_denoised_in_order(models: dict[str, PlayModel]) -> None:
    events = events_of(models["blocks"], ask("abc", "denoise"), tokens=30)
    (cells,) = of_kind(events, Cells)
    assert cells.blocks[0] == 4, "the prompt and its end-of-text mark are given"
    begins = [sum(cells.blocks[:n]) for n in range(len(cells.blocks) + 1)]
    blocks = [
        next(n for n in range(len(cells.blocks)) if begins[n + 1] > one.places[0]) for one in of_kind(events, Unmasked)
    ]
    assert blocks == sorted(blocks)


@pytest.mark.parametrize(
    ("source", "sections"),
    [("latents", 1), ("text", 1), ("first M tokens", 1), ("another text's latents", 1), ("each of these", 4)],
)
def test_a_frozen_model_answers_from_each_source(models: dict[str, PlayModel], source: str, sections: int) -> None:
    one = models["latents"]
    choices = {"source": source, "model": one.panels[0].choices[1].values[1]}
    question = ask("The stone is red. Which colour?", "latents", choices=choices, fields={"other": "The king is blue."})
    events = events_of(one, question, tokens=6, temperature=0.0)
    assert len(of_kind(events, Section)) == len(of_kind(events, Finished)) == sections
    maps = of_kind(events, HeatMap)
    assert [(len(one.rows), len(one.rows[0])) for one in maps] == [(4, 16), (4, 16)]
    assert maps[0].rows != maps[1].rows
    if source == "another text's latents":
        with pytest.raises(UserError, match="no other text"):
            events_of(one, ask("Red?", "latents", choices=choices))
        alone = events_of(
            one,
            ask("The king is blue.", "latents", choices={**choices, "source": "latents"}),
            tokens=6,
            temperature=0.0,
        )
        assert of_kind(alone, Finished)[0].text == of_kind(events, Finished)[0].text


def test_a_job_without_a_stream_shows_its_samples() -> None:
    class Sampled:
        def sample(self, prompt: str, how: Sampling) -> list[Sample]:
            return [Sample(prompt, f"{prompt}!{how.count}")]

    events: Any = list(Objective.stream(Sampled(), ask("x"), Sampling(count=5)))  # type: ignore[arg-type]
    assert [event.kind for event in events] == ["section", "finished"]
    assert events[1].text == "x!1"


def test_a_prompt_that_fills_the_context_is_refused(models: dict[str, PlayModel]) -> None:
    with pytest.raises(UserError, match="reads 256"):
        events_of(models["chat"], ask("stone " * 400, "chat"))
    events = events_of(models["chat"], ask("x" * 240, "complete"), tokens=100, temperature=1.0)
    assert of_kind(events, Finished)[0].tokens <= 16


# --- the system prompt


def test_a_conversation_is_written_under_the_system_prompt_of_the_training_rows(
    world: Any, tiny_base: Path, tmp_path: Path
) -> None:
    rows = [
        {
            "messages": [
                *([{"role": "system", "content": "Be brief."}] if n % 3 else []),
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "Red."},
            ]
        }
        for n in range(30)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuning = Tuning(world, tiny_base, tmp_path / "rows.jsonl", tmp_path)
    objective = tuning.objective("finetune.method=lora", "model.quant=none")
    run = tmp_path / "run"
    run.mkdir()
    objective.save_tokenizer(run)
    (tmp_path / "rows.jsonl").unlink()  # the run went to another machine
    from redline.jobs.objective import job_runtime

    alone = job_runtime("finetune").tokenizer_alone(objective.data.facts, run, objective.recipe)
    objective.data = alone
    assert objective.panels()[0].system == "Be brief."
    encoded = objective._with_system((Message(USER, "Which?"),))
    assert [(m.role, m.content) for m in encoded] == [(SYSTEM, "Be brief."), (USER, "Which?")]
    own = (Message(SYSTEM, "Be long."), Message(USER, "Which?"))
    assert objective._with_system(own) == own
    text = objective.tokenizer.decode(objective.tokenizer.encode_chat(encoded))
    assert (
        text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_rows_without_a_common_system_prompt_name_none(tmp_path: Path, world: Any, answers: Path) -> None:
    recipe = world.recipe(f"data.source={answers}")
    assert usual_system_prompt(recipe.data) is None
    assert usual_system_prompt(world.recipe(f"data.source={tmp_path / 'nothing'}").data) is None


def test_a_conversation_has_turns(models: dict[str, PlayModel]) -> None:
    turns = (Message(USER, "a"), Message(ASSISTANT, "b"), Message(USER, "c"))
    longer = events_of(models["chat"], Ask("chat", turns), tokens=1)
    shorter = events_of(models["chat"], Ask("chat", turns[-1:]), tokens=1)
    assert of_kind(longer, Section)[0].prompt_tokens > of_kind(shorter, Section)[0].prompt_tokens


# --- tokens to text


@given(st.text(max_size=40), st.text(max_size=10))
def test_text_decoded_token_by_token_is_the_text(text: str, before: str) -> None:
    tokenizer = ByteTokenizer()
    text = text.encode("utf-8", "replace").decode()
    stream = TextStream(tokenizer.decode, tokenizer.encode(before.encode("utf-8", "replace").decode()))
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join([*pieces, stream.finish()]) == text


def test_an_incomplete_character_is_shown_at_the_end() -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer.decode)
    assert [stream.add(token) for token in tokenizer.encode("a🙂")[:3]] == ["a", "", ""]
    assert "\ufffd" in stream.finish()
