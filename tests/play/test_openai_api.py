"""The API in OpenAI's form: raw requests, and the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.test import Client

from playing import served
from redline.jobs.objective import Sampling
from redline.play.app import PlayApp, open_play_server
from redline.play.models import PlayModel
from redline.play.openai_api import StopTexts

QUESTION = [{"role": "user", "content": "What is the colour of the stone?"}]
FIXED = {"seed": 5, "temperature": 0.8, "top_p": 0.95, "max_tokens": 12}


@pytest.fixture(scope="module")
def api(models: dict[str, PlayModel]) -> Client:
    return Client(PlayApp(list(models.values())))


def chunks(answer: Any) -> list[dict[str, Any]]:
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_models_are_listed(api: Client, models: dict[str, PlayModel]) -> None:
    listed = api.get("/v1/models").json
    assert listed["object"] == "list"
    assert [one["id"] for one in listed["data"]] == list(models)
    assert api.get("/v1/models/chat").json["id"] == "chat"
    assert api.get("/v1/models/nothing").json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("model", ["chat", "plans"])
def test_a_chat_completion_is_the_sampled_answer(api: Client, models: dict[str, PlayModel], model: str) -> None:
    request = {"model": model, "messages": QUESTION, **FIXED}
    answer = api.post("/v1/chat/completions", json=request).json
    assert (answer["object"], answer["model"]) == ("chat.completion", model)
    (choice,) = answer["choices"]
    sampled = models[model].opened.objective.sample(QUESTION[0]["content"], Sampling(1, 12, 5, 0.8, None, 0.95))
    assert choice["message"]["content"] == sampled[0].text
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    streamed = chunks(api.post("/v1/chat/completions", json={**request, "stream": True}))
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {one["object"] for one in streamed} == {"chat.completion.chunk"}
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in streamed)
    assert text == choice["message"]["content"]
    reasons = [one["choices"][0]["finish_reason"] for one in streamed]
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]


@pytest.mark.parametrize("model", ["text", "chat", "blocks", "latents"])
def test_a_completion_continues_a_text(api: Client, models: dict[str, PlayModel], model: str) -> None:
    request = {"model": model, "prompt": ["red line"], **FIXED}
    answer = api.post("/v1/completions", json=request).json
    assert answer["object"] == "text_completion"
    text = answer["choices"][0]["text"]
    if model != "latents":
        sampled = models[model].opened.objective.continuation("red line", Sampling(1, 12, 5, 0.8, None, 0.95))
        assert text == sampled[0].text
    with_usage = {**request, "stream": True, "stream_options": {"include_usage": True}}
    *streamed, last = chunks(api.post("/v1/completions", json=with_usage))
    assert "".join(one["choices"][0]["text"] for one in streamed) == text
    assert last["choices"] == []
    assert last["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] <= 12 or model == "blocks"


def test_log_probabilities(api: Client) -> None:
    request = {"model": "chat", "messages": QUESTION, **FIXED, "logprobs": True, "top_logprobs": 2}
    choice = api.post("/v1/chat/completions", json=request).json["choices"][0]
    content = choice["logprobs"]["content"]
    joined = "".join(one["token"] for one in content)
    # The last token may end in the middle of a character, which the text shows as one that cannot be decoded.
    assert choice["message"]["content"].removesuffix("\ufffd") == joined.removesuffix("\ufffd")
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 2 for one in content)
    assert all(bytes(one["bytes"]).decode() == one["token"] for one in content)
    request = {"model": "text", "prompt": "red", **FIXED, "logprobs": 3}
    found = api.post("/v1/completions", json=request).json["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"])
    assert "logprobs" in api.post("/v1/completions", json={**request, "logprobs": 99}).json["error"]["message"]


def test_a_stop_text_ends_the_answer_before_itself(api: Client) -> None:
    request = {"model": "text", "prompt": "red line", **FIXED, "max_tokens": 60}
    whole = api.post("/v1/completions", json=request).json["choices"][0]["text"]
    stop = whole[10:13]
    request["stop"] = [stop, "never written at all"]
    cut = api.post("/v1/completions", json=request).json["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    streamed = chunks(api.post("/v1/completions", json={**request, "stream": True}))
    assert "".join(one["choices"][0]["text"] for one in streamed) == cut["text"]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.randoms())
def test_a_stop_text_is_found_however_the_text_is_cut(text: str, stops: list[str], chance: Any) -> None:
    found, rest = StopTexts(tuple(stops)), text
    shown = ""
    while rest and not found.found:
        size = chance.randint(1, len(rest))
        shown, rest = shown + found.add(rest[:size]), rest[size:]
    if not found.found:
        shown += found.finish()
    ends = [text.index(stop) for stop in stops if stop in text]
    assert found.found == bool(ends)
    # Of two stop texts the one that is complete first ends the text.
    assert shown == text if not ends else text.startswith(shown) and len(shown) <= max(ends)
    assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"presence_penalty": 0.5},
        {"logit_bias": {"1": 5}},
        {"something_new": 1},
        {"max_tokens": 10**9},
        {"max_tokens": 0},
        {"temperature": 99},
        {"top_p": 0},
        {"stop": ["a"] * 9},
        {"stop": 3},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"top_logprobs": 50, "logprobs": True},
    ],
)
def test_what_is_not_done_is_refused_by_name(api: Client, change: dict[str, Any]) -> None:
    answer = api.post("/v1/chat/completions", json={"model": "chat", "messages": QUESTION, **change})
    assert answer.status_code == 400
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error"
    assert next(iter(change)).partition("_")[2] in error["message"]


def test_neutral_values_are_not_refused(api: Client) -> None:
    neutral = {
        "n": 1,
        "tools": [],
        "presence_penalty": 0,
        "user": "me",
        "response_format": {"type": "text"},
        "stop": None,
    }
    answer = api.post("/v1/chat/completions", json={"model": "chat", "messages": QUESTION, "max_tokens": 1, **neutral})
    assert answer.status_code == 200


def test_a_model_is_asked_for_what_it_does(api: Client) -> None:
    answer = api.post("/v1/chat/completions", json={"model": "text", "messages": QUESTION})
    assert (answer.status_code, "/v1/completions" in answer.json["error"]["message"]) == (400, True)
    answer = api.post("/v1/completions", json={"model": "plans", "prompt": "x"})
    assert (answer.status_code, "/v1/chat/completions" in answer.json["error"]["message"]) == (400, True)
    assert api.post("/v1/completions", json={"model": "gpt-4", "prompt": "x"}).status_code == 404
    too_long = [{"role": "user", "content": "stone " * 400}]
    answer = api.post("/v1/chat/completions", json={"model": "chat", "messages": too_long})
    assert (answer.status_code, "256" in answer.json["error"]["message"]) == (400, True)


@pytest.fixture
def address(models: dict[str, PlayModel]) -> Iterator[str]:
    yield from served(open_play_server(list(models.values()), "127.0.0.1", 0, guarded=True))


def test_the_official_client(address: str) -> None:
    openai = pytest.importorskip("openai")
    page, _, token = address.partition("?token=")
    client = openai.OpenAI(base_url=f"{page}v1", api_key=token, max_retries=0)
    assert "chat" in [model.id for model in client.models.list()]
    asked: Any = {"model": "chat", "messages": QUESTION, **FIXED}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    text = whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
    streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    parts = list(streamed)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    completed = client.completions.create(model="text", prompt="red", **FIXED, logprobs=2)
    streamed = client.completions.create(model="text", prompt="red", **FIXED, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == completed.choices[0].text
    with client.completions.create(model="text", prompt="red", max_tokens=8000, stream=True) as long:
        next(iter(long))  # closing it cancels: the next request is answered
    client.completions.create(model="text", prompt="red", max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(**asked, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "gpt-4"})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{page}v1", api_key="wrong", max_retries=0).models.list()
