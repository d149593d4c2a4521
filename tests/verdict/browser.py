"""A browser driven over its own pipes, so that the tests need no further package.

https://chromedevtools.github.io/devtools-protocol/
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), "")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
# The browser reads commands from descriptor 3 and answers on descriptor 4.
STARTER = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 50) for n in sys.argv[1:3]);"
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
LOUD = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Tab:
    """One page in a browser, with its errors, warnings and network requests."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self._session = ""
        self._loaded: set[str] = set()
        self.complaints: list[Any] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)  # as in a window in front

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, query: str = "") -> None:
        """Load a file, asked for `query`, and wait until it is loaded."""
        loader = self.ask("Page.navigate", url=page.as_uri() + query)["loaderId"]
        while loader not in self._loaded:  # it may be, before the answer to the command is there
            self._note(self._next())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self.ask("Runtime.evaluate", **asked)["result"]
        return found.get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": "\r", "windowsVirtualKeyCode": 13} if key == "Enter" else {}
        text |= {"windowsVirtualKeyCode": 9} if key == "Tab" else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Page.lifecycleEvent" and event["params"]["name"] == "load":
            self._loaded.add(event["params"]["loaderId"])
        if event.get("method") in LOUD:
            self.complaints.append(event)
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """Start a browser with a new profile in the folder `profile`, and return its page."""
    commands, write = os.pipe()
    read, answers = os.pipe()
    command = [sys.executable, "-c", STARTER, str(commands), str(answers), PROGRAM]
    process = subprocess.Popen(
        [*command, *OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(commands, answers),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Tab(read, write)
    finally:
        os.close(write)  # the browser ends with the pipe that it reads from
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
        os.close(read)
