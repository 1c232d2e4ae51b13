"""A real browser without a window: Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.waiting import SECONDS

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PATIENCE_SECONDS = 120
_PRESSING = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, ""), "ArrowLeft": (37, ""), "ArrowRight": (39, "")}
"""Keys that a browser itself does something with: their number and what they type."""


def executable() -> str:
    """Skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium-headless-shell")
    return found


class Page:
    """One tab. What it logged, asked the network for and failed at is kept."""

    def __init__(self, socket: Connection) -> None:
        self._socket = socket
        self._number = 0
        self._events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a file at this width of the window and wait until its films can be played."""
        self.visit(path.resolve().as_uri(), width, height, dark=dark)
        self.wait("[...document.querySelectorAll('video')].every(v => v.readyState >= 2 || v.error)")

    def visit(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a page at this width of the window."""
        self._events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def picture(self, selector: str) -> bytes:
        """PNG of one element, as it is in the window."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        clip = {side: self.evaluate(f"{box}.{side}") for side in ("x", "y", "width", "height")}
        shot = self._call("Page.captureScreenshot", format="png", clip={**clip, "scale": 1})
        return base64.b64decode(shot["data"])

    def pdf(self, path: Path) -> None:
        printed = self._call("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        path.write_bytes(base64.b64decode(printed["data"]))

    def as_printed(self) -> None:
        """Show the page as paper would."""
        self._call("Emulation.setEmulatedMedia", media="print")

    def key(self, code: str, *, down: bool) -> None:
        """Hold or release a key by its place on the keyboard, as KeyW."""
        number, text = _PRESSING.get(code, (0, ""))
        kind = ("keyDown" if text else "rawKeyDown") if down else "keyUp"
        name = code if number else code.removeprefix("Key").lower()
        pressed = {"windowsVirtualKeyCode": number, "text": text if down else ""}
        self._call("Input.dispatchKeyEvent", type=kind, key=name, code=code, **pressed)

    def press(self, code: str) -> None:
        self.key(code, down=True)
        self.key(code, down=False)

    def click(self, selector: str) -> None:
        """With a mouse, in the middle of an element."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector: str, right: int) -> None:
        """With a mouse whose button stays down, from the middle of an element."""
        x, y = self._middle(selector)
        self._call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        self.move(selector, right)

    def move(self, selector: str, right: int) -> None:
        """With the button down, to so far from the middle of an element."""
        x, y = self._middle(selector)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x + right, y=y, button="left", buttons=1)

    def drop(self) -> None:
        """Release the mouse's button."""
        self._call("Input.dispatchMouseEvent", type="mouseReleased", x=0, y=0, button="left", clickCount=1)

    def wheel(self, selector: str, down: int) -> None:
        """Turn the mouse's wheel over the middle of an element, by pixels."""
        x, y = self._middle(selector)
        self._call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=down)

    def _middle(self, selector: str) -> tuple[float, float]:
        """Of an element, in the window."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        x, y = (self.evaluate(f"{box}.{low} + {box}.{size} / 2") for low, size in (("x", "width"), ("y", "height")))
        return x, y

    def reload(self) -> None:
        self._call("Page.reload")
        self.wait("document.readyState === 'complete'")

    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the page was opened."""
        self.evaluate("0")  # what was reported before this is here now
        bad = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.loadingFailed")
        return [json.dumps(event) for event in self._events if event["method"] in bad]

    def requests(self) -> list[str]:
        """What was asked for besides the file itself and data inside it, with the addresses of WebSockets."""
        asked = [e["params"]["request"]["url"] for e in self._events if e["method"] == "Network.requestWillBeSent"]
        asked += [e["params"]["url"] for e in self._events if e["method"] == "Network.webSocketCreated"]
        return [url for url in asked if not url.startswith(("data:", "file:"))]

    def wait(self, condition: str) -> None:
        """Until an expression is true on the page."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"the page never got there: {condition}"
            time.sleep(0.05)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=_PATIENCE_SECONDS))
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if "method" in message:
                self._events.append(message)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    command = [executable(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--mute-audio"]
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            with connect(_tab(Path(profile), process), max_size=None) as socket:
                yield Page(socket)
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # the command may be a script that started the browser
            process.wait(timeout=SECONDS)


def _tab(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """The address of the first tab, once the browser listens."""
    import urllib.request

    chosen = profile / "DevToolsActivePort"
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not chosen.exists() or not chosen.read_text().strip():
        assert process.poll() is None and time.monotonic() < deadline, "the browser did not start"
        time.sleep(0.05)
    port = chosen.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=_PATIENCE_SECONDS) as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
