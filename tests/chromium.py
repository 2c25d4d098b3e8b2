"""A headless Chromium, driven over its DevTools pipe: what a page does in a browser. Needs no package."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_SECONDS = 300


def chromium_path() -> str | None:
    """The browser's program; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser. Every wait has a deadline."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.failures: list[str] = []
        """Exceptions and errors that the page reported, such as what its security policy blocked."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools method. Raises RuntimeError where the browser refuses it."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = json.dumps({"id": self._number, "method": method, "params": parameters, **session})
        os.write(self._to, message.encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, address: str) -> None:
        """Show a page, and return when it is loaded."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, expression: str, *, seconds: float = DEADLINE_SECONDS) -> None:
        """Return once an expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"{expression} is not true after {seconds} s"
            time.sleep(0.05)

    def hover(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str) -> None:
        """Press and release a key without a character, such as ArrowRight."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def type(self, text: str) -> None:
        """Write into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the window's size, the colour scheme, and whether it is a phone's."""
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page, or of its visible part."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE_SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser said nothing for {DEADLINE_SECONDS} s"
            part = os.read(self._from, 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        first, _, self._received = self._received.partition(b"\0")
        message = json.loads(first)
        if message.get("method") == "Runtime.exceptionThrown":
            self.failures.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.failures.append(message["params"]["entry"]["text"])
        return message


@contextmanager
def opened_browser(profile: Path) -> Generator[Browser]:
    """A browser with a profile in an empty folder. It ends with the context."""
    program = chromium_path()
    assert program is not None, "call chromium_path first"
    (reads, to_browser), (from_browser, writes) = os.pipe(), os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    reads, writes = _out_of_the_way(reads), _out_of_the_way(writes)

    def place() -> None:  # the browser reads commands from descriptor 3 and writes answers to 4
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    process = subprocess.Popen(
        [program, *options, f"--user-data-dir={profile}", "--hide-scrollbars"],
        preexec_fn=place,  # noqa: PLW1509 - it calls dup2 alone
        close_fds=False,  # others are not inherited anyway
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(reads)
    os.close(writes)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)
        process.terminate()
        process.wait(timeout=DEADLINE_SECONDS)
        os.close(from_browser)


def _out_of_the_way(descriptor: int) -> int:
    """The same pipe under a number above those that the browser uses."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
