"""A headless Chromium and what a person would do in it, through its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

SECONDS = 60.0
"""Patience with a browser on a machine that is busy with others."""

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""The program; ``None`` where there is none (requirements/debian.txt names it)."""


class Page:
    """One page. ``problems`` are errors of its scripts, and of its rules about what may be loaded."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.problems: list[str] = []
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Asks the browser something."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        end = time.monotonic() + SECONDS
        while True:
            message = json.loads(self._socket.recv(max(0.01, end - time.monotonic())))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error" and params["entry"]["source"] != "network":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Goes there and waits for the page to have loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """What a script gives, in the page."""
        # The page forbids eval to its own scripts; the debugger is none of them.
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = SECONDS) -> None:
        """Waits until a script gives something true."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, (expression, self.problems, self.value("document.body.innerText"))
            time.sleep(0.02)

    def type(self, selector: str, text: str) -> None:
        """Writes into a field as a keyboard does."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        """In whatever has the focus."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is there."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """What a person sees."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path, width: int = 1280, height: int = 800) -> Iterator[Page]:
    """A browser of its own, with its files in ``folder``; it ends with the block."""
    assert BROWSER is not None
    profile = folder / "chromium"
    process = subprocess.Popen(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",  # tests run as root in containers
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-component-update",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port, _ = _wait(profile / "DevToolsActivePort", process).split("\n")[:2]
        with connect(_first_page(int(port)), max_size=None, open_timeout=SECONDS) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _wait(path: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and "\n" in (text := path.read_text()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"the browser did not start (status {process.poll()})")


def _first_page(port: int) -> str:
    import urllib.request

    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS) as answer:
            for target in json.load(answer):
                if target["type"] == "page":
                    return str(target["webSocketDebuggerUrl"])
        time.sleep(0.02)
    raise AssertionError("the browser has no page")
