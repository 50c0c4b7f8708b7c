"""Chromium without a window, driven over DevTools' pipe; no package beside the standard library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)
# DevTools reads descriptor 3 and writes 4; a process that is started keeps only descriptors by their own numbers.
WRAPPER = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
PATIENCE = 60  # seconds until something that should come is missed


def find_chromium() -> str | None:
    """Returns the path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium process; `page` opens tabs."""

    def __init__(self, process: subprocess.Popen[bytes], sending: int, receiving: int):
        self._process = process
        self._sending, self._receiving = sending, receiving
        self._rest = b""
        self._serial = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict:
        """Calls a method of DevTools and returns its result; events that come meanwhile are kept."""
        self._serial += 1
        message = {"id": self._serial, "method": method, "params": params or {}}
        text = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while text:
            text = text[os.write(self._sending, text) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._serial:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receiving], [], [], max(0, end - time.monotonic()))
            part = os.read(self._receiving, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError(f"chromium said nothing; its exit status is {self._process.poll()}")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def page(self, width: int, height: int, scheme: str) -> Page:
        """Opens an empty tab, in a profile of its own.

        Args:
          width, height: CSS pixels. scheme: ``light`` or ``dark``, as the system would prefer.
        """
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})
        attach = {"targetId": target["targetId"], "flatten": True}
        session = self.call("Target.attachToTarget", attach)["sessionId"]
        return Page(self, session, width, height, scheme)


class Page:
    """One tab: what it asked for and what it complained of is kept."""

    def __init__(self, browser: Browser, session: str, width: int, height: int, scheme: str):
        self._browser, self._session = browser, session
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", metrics)
        self.call(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        self.call("Emulation.setFocusEmulationEnabled", {"enabled": True})

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Calls a method of DevTools on this tab."""
        return self._browser.call(method, params, self._session)

    def open(self, address: str) -> None:
        """Goes to an address and waits until it has loaded."""
        self.call("Page.navigate", {"url": address})
        self.wait(f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page; a promise is awaited."""
        params = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", params)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description", answer))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> Any:
        """Waits until an expression is true in the page and returns its value.

        Raises:
          AssertionError: it did not become true.
        """
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):  # the page may be on its way to another
                if value := self.run(condition):
                    return value
            assert time.monotonic() < end, f"still false after {seconds} s: {condition}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """Returns the text of an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def type(self, text: str) -> None:
        """Writes into what has the focus."""
        self.call("Input.insertText", {"text": text})

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses and lets go of a key, by its DOM name."""
        code, text = KEYS[key]
        event = {"key": key, "code": key if key != " " else "Space", "windowsVirtualKeyCode": code}
        event |= {"modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", event | {"type": "keyDown", "text": text})
        self.call("Input.dispatchKeyEvent", event | {"type": "keyUp"})

    def shoot(self, path: Path) -> None:
        """Writes what is seen as a PNG file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", {"format": "png"})["data"]))

    def _events(self, method: str) -> list[dict[str, Any]]:
        self.run("0")  # what was said before the answer to this has come
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] == method]

    def complaints(self) -> list[str]:
        """Returns errors and warnings of the console, and exceptions that nobody caught."""
        said = [
            " ".join(str(arg.get("value", arg.get("description"))) for arg in event["args"])
            for event in self._events("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        said += [str(event["exceptionDetails"]) for event in self._events("Runtime.exceptionThrown")]
        entries = [event["entry"] for event in self._events("Log.entryAdded")]
        return said + [f"{entry['text']} {entry.get('url', '')}" for entry in entries]

    def requests(self) -> list[str]:
        """Returns the addresses of everything that the tab asked for."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def bodies(self) -> list[Any]:
        """Returns the JSON of everything that the tab posted."""
        sent = [event["request"] for event in self._events("Network.requestWillBeSent")]
        return [json.loads(request["postData"]) for request in sent if request["method"] == "POST"]


@contextlib.contextmanager
def run_browser(chromium: str, profile: Path) -> Iterator[Browser]:
    """Runs a Chromium until the block is left.

    Args:
      chromium: path of the program. profile: an empty folder for it.
    """
    pipes = [*os.pipe(), *os.pipe()]
    # Out of the way of 3 and 4, which the child's ends become.
    theirs_in, ours_out, ours_in, theirs_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in pipes)
    for fd in pipes:
        os.close(fd)
    command = [sys.executable, "-c", WRAPPER, str(theirs_in), str(theirs_out), chromium, *FLAGS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    browser = Browser(process, ours_out, ours_in)
    try:
        yield browser
        browser.call("Browser.close")
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
