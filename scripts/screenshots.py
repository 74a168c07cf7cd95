"""Renew the pictures of the report and the live page: python scripts/screenshots.py RUN OTHER_RUN

They are docs/images/report.png, report-400.png and report-compared.png, watch.png and watch-400.png. Both runs must be
finished; the live page shows them as they were after a part of their time. Needs Chromium, its driver and selenium.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "src"))

try:
    from PIL import Image
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    from redline.runs.live.server import open_server
    from redline.runs.live.watch import Watch
    from redline.runs.report.compare import write_comparison
    from redline.runs.report.page import write_report
    from redline.vocabulary import EVENTS_FILE, PROCESS_LOCK_FILE, RECIPE_LOCK_FILE
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed here: run `make tools`, then .venv/bin/python scripts/screenshots.py")

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
)
PART = 0.625  # of a run that the live page shows


def open_browser(profile: str) -> Any:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        sys.exit("chromium and chromedriver are not installed (Debian: chromium chromium-driver).")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    return webdriver.Chrome(options, Service(chromedriver))


def capture(browser: Any, address: str, image: str, width: int, scheme: str, height: int, ready: str) -> None:
    """Write a picture of the page, from its top to `height` or its end."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(address)
    end = time.monotonic() + 30
    while not browser.execute_script(f"return {ready}"):
        if time.monotonic() > end:
            sys.exit(f"{address} was not drawn within 30 s.")
        time.sleep(0.1)
    whole = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, whole), "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    # 256 colours are enough for a page without photographs, and a third of the bytes.
    with Image.open(io.BytesIO(base64.b64decode(shot["data"]))) as picture:
        few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(IMAGES / image, optimize=True)


def beginning_of(run: Path, folder: Path, now: float) -> Path:
    """Copy the beginning of a run, moved in time so that its last event has just been logged."""
    folder.mkdir(parents=True)
    events = [json.loads(line) for line in (run / EVENTS_FILE).read_text(encoding="utf-8").splitlines()]
    kept = [event for event in events if event["type"] != "stop" and (event.get("progress") or 0.0) <= PART]
    last = max(place for place, event in enumerate(kept) if event["type"] == "step" and event["progress"] <= PART)
    kept = kept[: last + 1]
    late = now - kept[-1]["time"]
    lines = [json.dumps({**event, "time": event["time"] + late}) for event in kept]
    (folder / EVENTS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    shutil.copy(run / RECIPE_LOCK_FILE, folder)
    return folder


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Hold the lock of a run, as the process that trains it does."""
    with open(run / PROCESS_LOCK_FILE, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def served(*runs: Path) -> Iterator[str]:
    server, address = open_server(Watch(Path("runs"), runs), "127.0.0.1", 0, guarded=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        server.shutdown()
        thread.join()


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage:{(__doc__ or '').partition(':')[2].splitlines()[0]}")
    run, other = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        browser = open_browser(str(root / "profile"))
        loaded, drawn = "document.readyState === 'complete'", "document.body.dataset.drawn >= 2"
        try:
            report = write_report(run, root / "report.html").as_uri()
            compared = write_comparison([run, other], root / "comparison.html").as_uri()
            capture(browser, report, "report.png", 1280, "light", 3100, loaded)
            capture(browser, report, "report-400.png", 400, "dark", 2500, loaded)
            capture(browser, compared, "report-compared.png", 1280, "light", 1900, loaded)
            now = time.time()
            first, second = (beginning_of(one, root / "runs" / one.name, now) for one in (run, other))
            with held(first), held(second):
                with served(first) as address:
                    capture(browser, address, "watch.png", 1280, "light", 1200, drawn)
                with served(first, second) as address:
                    capture(browser, address, "watch-400.png", 400, "dark", 1500, drawn)
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
