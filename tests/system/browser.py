"""Chromium without a window, told what to do over its DevTools protocol, on a pair of pipes: no driver, no port."""

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEADLINE_S = 240.0
EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
MARGIN = 8  # pixels around the picture of an element
KEYS = {"Enter": 13, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38}


class Page:
    """One tab. Every call fails when the browser does not answer in time, or answers with an error."""

    def __init__(self, commands: Any, replies: Any) -> None:
        self._commands = commands
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.problems: list[str] = []  # that the page's console and its policy have told of
        self._number, self._session = 0, None
        threading.Thread(target=self._read, args=(replies,), daemon=True).start()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1440, height: int = 1000, is_dark: bool = False) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.darken(is_dark)
        self._call("Page.navigate", url=url)

    def darken(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        reply = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def until(self, expression: str, deadline_s: float = DEADLINE_S) -> Any:
        """The value once it is true; meanwhile a page may still be loading."""
        end_s = time.monotonic() + deadline_s
        while not (value := self.ask(f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()")):
            assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {expression}\n{self.problems}"
            time.sleep(0.05)
        return value

    def write(self, text: str) -> None:
        """Into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **code)

    def picture(self, selector: str = "") -> bytes:
        """A PNG of what is to be seen, or of one element."""
        params: dict[str, Any] = {"format": "png"}
        if selector:
            box = self.ask(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
            clip = {"x": box["x"] - MARGIN, "y": box["y"] - MARGIN, "scale": 1}
            clip |= {"width": box["width"] + 2 * MARGIN, "height": box["height"] + 2 * MARGIN}
            params |= {"clip": clip, "captureBeyondViewport": True}
        return base64.b64decode(self._call("Page.captureScreenshot", **params)["data"])

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        reply = self._answers.get(timeout=DEADLINE_S)
        assert reply is not None, "the browser has ended"
        assert reply["id"] == self._number, reply
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    def _read(self, replies: Any) -> None:
        """Sorts answers from events, until the browser ends."""
        rest = b""
        while part := os.read(replies.fileno(), 2**16):
            *messages, rest = (rest + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.put(message)
                elif message["method"] in ("Log.entryAdded", "Runtime.exceptionThrown"):
                    self.problems.append(json.dumps(message["params"]))
        self._answers.put(None)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser of its own, which has never seen another one."""
    assert EXECUTABLE is not None, "there is no chromium"
    commands_in, commands_out = os.pipe()
    replies_in, replies_out = os.pipe()
    command = ["bash", "-c", f'exec "$@" 3<&{commands_in} 4>&{replies_out}', "bash", EXECUTABLE, *FLAGS]
    with (
        tempfile.TemporaryDirectory(prefix="splitserve-browser-", ignore_cleanup_errors=True) as folder,
        (Path(folder) / "log").open("wb") as log,
    ):
        process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}/profile", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(commands_in, replies_out),
            env={**os.environ, "HOME": folder},
        )
        os.close(commands_in)
        os.close(replies_out)
        with os.fdopen(commands_out, "wb") as commands, os.fdopen(replies_in, "rb", buffering=0) as replies:
            try:
                yield Page(commands, replies)
            finally:
                process.kill()
                process.wait()
