"""Headless Chromium, controlled by the DevTools protocol over a pipe, without a driver or package.

with Browser(profile) as browser:
    tab = browser.open(page, width=390, dark=True)
    tab.evaluate("document.title"), tab.requests, tab.screenshot(path)
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0

# Lowest contrast between a text and its background, as WCAG 2 defines it, and that text.
CONTRAST = """(() => {
  const rgb = colour => colour.match(/[\\d.]+/g).map(Number);
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const paint = rgb(getComputedStyle(at).backgroundColor);
      if (paint.length === 3 || paint[3] === 1) return paint;
    }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, style = getComputedStyle(element);
    if (!texts.currentNode.data.trim() || !element.getClientRects().length) continue;
    const paint = rgb(element.closest("svg") ? style.fill : style.color);
    const pair = [light(paint), light(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < worst[0]) worst = [ratio, texts.currentNode.data.trim().slice(0, 40)];
  }
  return worst;
})()"""

# Elements outside the window, and elements cut off inside a box that does not scroll.
OUTSIDE = """[...document.querySelectorAll("body *")].filter(element => {
  const box = element.getBoundingClientRect(), style = getComputedStyle(element);
  if (element.closest(".skip") || element.closest("thead") || element.closest("svg") || !box.width) return false;
  const cut = element.scrollWidth > element.clientWidth + 1 && style.overflowX === "hidden";
  return box.right > innerWidth + 1 || box.left < -1 || cut;
}).map(element => element.tagName + "." + element.className + ": " + element.textContent.slice(0, 40))"""


def chromium() -> str | None:
    """Return the path of the browser, or None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Browser process with its own profile folder."""

    def __init__(self, profile: Path) -> None:
        path = chromium()
        assert path is not None, "ask `chromium()` first"
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        flags += [
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-extensions",
        ]
        flags += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]

        def as_protocol_pipes() -> None:  # Chromium expects them as descriptors 3 and 4
            high = [os.dup(to_browser), os.dup(from_browser)]
            keep = [os.dup2(descriptor, number) for descriptor, number in ((high[0], 90), (high[1], 91))]
            os.dup2(keep[0], 3)
            os.dup2(keep[1], 4)

        self._process = subprocess.Popen(
            [path, *flags],
            preexec_fn=as_protocol_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._read, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(timeout=SECONDS)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]

    def wait(self, method: str, session: str) -> None:
        """Wait for an event of a tab."""
        while not any(event["method"] == method and event.get("sessionId") == session for event in self.events):
            self._next()

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._read += more
        line, _, self._read = self._read.partition(b"\0")
        said = json.loads(line)
        if "method" in said:
            self.events.append(said)
        return said

    def open(self, page: Path, width: int = 1280, *, dark: bool = False, media: str = "screen") -> Tab:
        """Open a page in a window of a width, on a light or dark screen or in print."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable", session)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, media=media, features=[scheme])
        self.call("Page.navigate", session, url=page.as_uri())
        self.wait("Page.loadEventFired", session)
        return Tab(self, session, width)


class Tab:
    """Open page."""

    def __init__(self, browser: Browser, session: str, width: int) -> None:
        self._browser, self._session, self._width = browser, session, width

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of the promise that the expression gives."""
        found = self._browser.call(
            "Runtime.evaluate", self._session, expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    @property
    def requests(self) -> list[str]:
        """Return the addresses that the page has requested, its own included."""
        sent = [event for event in self._browser.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent if event.get("sessionId") == self._session]

    def screenshot(self, path: Path, height: int | None = None) -> Path:
        """Write the whole page, or its first `height` pixels, as a PNG."""
        tall = height or min(16000, int(self.evaluate("document.documentElement.scrollHeight")))
        clip = {"x": 0, "y": 0, "width": self._width, "height": tall, "scale": 1}
        shot = self._browser.call(
            "Page.captureScreenshot", self._session, format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(shot["data"]))
        return path
