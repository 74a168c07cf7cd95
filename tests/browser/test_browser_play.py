"""The page of `redline play` in a browser: every panel is clicked, typed into, streamed, cancelled and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from latents import other_base, write_rows
from playing import HDP, chat_model, latent_model, served, text_model
from redline.jobs.streaming import Finished, Section, Token
from redline.play.app import open_play_server
from redline.play.models import PlayModel

pytestmark = pytest.mark.timeout(120)

HOSTILE = "<img src='//evil.example/x' onerror='document.title=1'></pre><script>document.title=2</script>"
ANSWERED = "Number(document.body.dataset.answered || 0)"
ANSWERS = "[...document.querySelectorAll('.answer')]"


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, tiny: Any, corpus: Path, tiny_base: Path, answers: Path
) -> dict[str, PlayModel]:
    folder = tmp_path_factory.mktemp("played")
    block = ("objective=block_diffusion", "block_diffusion.block_size=8", "data.pack=false")
    found = [
        text_model(tiny, corpus, name="<i>text"),
        chat_model(tiny_base, answers, folder),
        text_model(tiny, corpus, *block, name="blocks"),
        text_model(tiny, corpus, *HDP, name="plans"),
        latent_model([tiny_base, other_base(folder / "second", spread=0.3)], write_rows(folder / "rows.jsonl"), folder),
    ]
    return {one.name: one for one in found}


@pytest.fixture(scope="module")
def address(models: dict[str, PlayModel]) -> Iterator[str]:
    yield from served(open_play_server(list(models.values()), "127.0.0.1", 0, guarded=False))


def choose(page: Any, selector: str, value: str) -> None:
    script = f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
    page.run(script + " e.dispatchEvent(new Event('change', {bubbles: true})); return e.value; })()")


def only(page: Any, model: str) -> None:
    choose(page, "#beside", "")
    choose(page, "#model", model)


def setting(page: Any, name: str, value: str) -> None:
    page.run(f"(document.getElementById('{name}').value = '{value}')")


def type_into(page: Any, selector: str, text: str) -> None:
    page.driver.find_element("css selector", selector).send_keys(text)


def send(page: Any, text: str) -> None:
    from selenium.webdriver.common.keys import Keys

    before = page.run(ANSWERED)
    type_into(page, "#prompt", text + Keys.ENTER)
    page.wait(f"{ANSWERED} > {before}")


def fits(page: Any) -> None:
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing overflows the page"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_every_panel(page: Any, address: str, width: int, scheme: str) -> None:
    page.open(address, width, scheme)
    assert page.run("document.getElementById('beside').value") == "chat", "several models are compared at once"
    dark = page.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 19, 18)"
    assert dark == (scheme == "dark")

    only(page, "<i>text")
    setting(page, "tokens", "20")
    send(page, "The red line")
    assert page.text(".answer header b") == "<i>text"
    assert "tokens" in page.text(".state")
    assert page.run("document.querySelectorAll('.tokens .token').length") > 3
    fits(page)

    only(page, "chat")
    setting(page, "tokens", "8")
    send(page, "What is the colour?")
    send(page, "And now?")
    assert page.run("document.querySelectorAll('#turns > li').length") == 2, "a chat has turns"
    page.run("document.querySelector('[value=complete]').click()")
    assert page.run("document.querySelectorAll('#turns > li').length") == 0
    send(page, "It is")
    fits(page)

    only(page, "blocks")
    setting(page, "tokens", "30")
    send(page, "abc")
    cells = page.run("document.querySelectorAll('.cell').length")
    assert cells > 20
    assert page.run("document.querySelectorAll('.cell.masked').length") == 0
    assert page.run("document.querySelectorAll('.block').length") > 3
    assert "passes" in page.text(".state")
    choose(page, "#choice-sampler", "ancestral")
    send(page, "")
    fits(page)

    only(page, "plans")
    send(page, "How many?")
    titles = "[...document.querySelectorAll('.part h3')].map((h) => h.textContent.trim())"
    assert page.run(titles) == ["plan", "execution"]
    assert page.run("document.querySelectorAll('.cell').length") == 96
    fits(page)

    only(page, "latents")
    choose(page, "#choice-source", "each of these")
    setting(page, "tokens", "6")
    type_into(page, "[name=other]", "The king is blue.")
    send(page, "The stone is red.")
    assert page.run(titles)[0].startswith("Latents of the text")
    assert page.run("document.querySelectorAll('.part h3').length") == 6
    assert page.run("[...document.querySelectorAll('canvas')].map((c) => [c.width, c.height])") == [[16, 4], [16, 4]]
    fits(page)

    requested = [urlparse(one) for one in page.requests()]
    assert {(one.scheme, one.hostname) for one in requested} <= {("http", "127.0.0.1"), ("data", None)}
    assert page.messages() == [], "the content security policy blocked nothing"


def test_two_models_side_by_side(page: Any, address: str) -> None:
    page.open(address)
    choose(page, "#model", "chat")
    choose(page, "#beside", "plans")
    setting(page, "tokens", "5")
    send(page, "What is the colour?")
    assert page.run(f"{ANSWERS}.map((a) => a.querySelector('b').textContent)") == ["chat", "plans"]
    assert page.run(f"{ANSWERS}.map((a) => a.dataset.state)") == ["done", "done"], page.text(".error")
    tops = page.run(f"{ANSWERS}.map((a) => a.getBoundingClientRect().top)")
    assert tops[0] == tops[1], "they stand beside each other"
    choose(page, "#beside", "<i>text")
    send(page, "Why?")
    assert page.run(f"{ANSWERS}.map((a) => a.dataset.state)") == ["done", "failed"], (
        "a model without that panel says so"
    )


def test_a_stream_is_cancelled_and_the_next_one_is_answered(page: Any, address: str) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(address)
    only(page, "<i>text")
    setting(page, "tokens", "8000")
    for stop in (lambda: page.run("document.getElementById('stop').click()"), lambda: page.keys(Keys.ESCAPE)):
        before = page.run(ANSWERED)
        type_into(page, "#prompt", "x" + Keys.ENTER)
        page.wait("document.querySelectorAll('.token').length > 2 && !document.getElementById('stop').disabled")
        stop()
        page.wait(f"{ANSWERED} > {before}")
        assert "stopped" in page.text(".state")
    setting(page, "tokens", "3")
    send(page, "x")
    assert page.run(f"{ANSWERS}.at(-1).dataset.state") == "done"


def test_what_a_model_writes_is_text(
    page: Any, address: str, models: dict[str, PlayModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hostile(self: Any, ask: Any, how: Any) -> Iterator[Any]:
        yield Section("x", HOSTILE, HOSTILE)
        yield Token("x", HOSTILE, -0.5, ((HOSTILE, -0.5),))
        yield Finished("x", HOSTILE)

    monkeypatch.setattr(type(models["chat"]), "stream", hostile)
    page.open(address)
    only(page, "chat")
    send(page, HOSTILE)
    page.run("document.querySelector('.token').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")
    assert page.text(".token") == HOSTILE
    assert page.text(".prompt") == HOSTILE
    assert page.text("#tip").startswith(HOSTILE.replace(" ", "␣"))
    assert page.run("document.querySelectorAll('#turns img, #turns script, #tip img').length") == 0
    assert page.run("document.title") == "redline play"


def test_the_keyboard_and_the_probabilities(page: Any, address: str) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(address)
    only(page, "<i>text")
    setting(page, "tokens", "6")
    send(page, "The red line")
    page.run("document.querySelector('.tokens').focus()")
    page.keys(Keys.HOME)
    first = page.text("#tip")
    assert "%" in first
    page.keys(Keys.ARROW_RIGHT)
    assert page.run("document.querySelectorAll('.token')[1].classList.contains('current')")
    assert page.run("document.querySelectorAll('#tip tr').length") == 5
    page.keys(Keys.ESCAPE)
    assert page.run("document.getElementById('tip').hidden")
    reached = set()
    for _ in range(30):
        page.keys(Keys.TAB)
        reached.add(page.run("document.activeElement.id || document.activeElement.className"))
    assert {"model", "beside", "prompt", "send", "again", "copy", "seed", "tokens"} <= reached


def test_copy_as_command(page: Any, address: str) -> None:
    page.open(address)
    only(page, "blocks")
    setting(page, "seed", "7")
    type_into(page, "#prompt", "it's red")
    page.run("document.getElementById('copy').click()")
    command = page.text("#command")
    assert command.startswith("redline sample runs/blocks --prompt 'it'\\''s red' --temperature 0.8")
    assert command.endswith("--seed 7 --set sampler=first_hitting")
    only(page, "chat")
    type_into(page, "#prompt", "Hi")
    page.run("(document.getElementById('system').value = 'Be brief.')")
    page.run("document.getElementById('copy').click()")
    assert page.text("#command").startswith("redline chat runs/chat --system 'Be brief.'")


def test_the_same_seed_gives_the_same_text(page: Any, address: str) -> None:
    page.open(address)
    only(page, "<i>text")
    setting(page, "tokens", "12")
    texts = []
    for seed in ("3", "4", "3"):
        setting(page, "seed", seed)
        page.run("(document.getElementById('prompt').value = '')")
        send(page, "The red")
        texts.append(page.run("document.querySelector('.tokens').textContent"))
    assert texts[0] == texts[2] != texts[1]
