"""A headless Chromium driven by Selenium. Without it the tests are skipped with a reason."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))  # live_logs

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,1000"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    opened = selenium.Chrome(options, Service(chromedriver))
    opened.set_page_load_timeout(60)
    opened.set_script_timeout(60)
    opened.get("about:blank")
    yield opened
    opened.quit()


class Page:
    """The actions of a test on a page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str, width: int = 1280, scheme: str = "light") -> Page:
        self.messages()
        self.requests()
        self.size(width)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get(address)
        self.wait("document.body.dataset.drawn >= 1")
        return self

    def size(self, width: int, height: int = 1000) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)

    def command(self, name: str, **options: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, options)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return ({script})")

    def wait(self, condition: str, seconds: float = 30) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: self.run(condition), condition)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def keys(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def messages(self) -> list[str]:
        """Return the errors and warnings of the browser console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return every address that was requested since the last call."""
        entries = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [entry["params"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]
        return [e["request"]["url"] for e in sent if not e["documentURL"].startswith("chrome://")]  # its own tabs


@pytest.fixture
def page(driver: Any) -> Iterator[Page]:
    yield Page(driver)
    driver.get("about:blank")


@pytest.fixture
def served() -> Iterator[Callable[..., str]]:
    """Return a function that serves runs from a thread and returns the address."""
    from redline.runs.live.server import open_server
    from redline.runs.live.watch import Watch

    running = []

    def serve(root: Path, *named: Path, port: int = 0, guarded: bool = False) -> str:
        server, address = open_server(Watch(root, named), "127.0.0.1", port, guarded)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        running.append((server, thread))
        return address

    def stop() -> None:
        while running:
            server, thread = running.pop()
            server.shutdown()
            thread.join()

    serve.stop = stop  # type: ignore[attr-defined]
    yield serve
    stop()
