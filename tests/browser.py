"""A real browser for tests: headless Chromium, steered over a pipe by its DevTools protocol."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


class Navigated(Exception):
    """The tab left the page while it ran a script."""


class Browser:
    def __init__(self, profile: Path):
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        import fcntl  # not on Windows

        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (there, back)]

        def place() -> None:  # Chromium reads commands from 3 and writes to 4
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (there, back, *ends):
            os.close(end)
        self._number, self._rest = 0, b""

    def command(self, method: str, session: str | None = None, **parameters) -> dict:
        """Sends one command and returns its result; events in between are dropped."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                piece = os.read(self._in, 1_000_000)
                assert piece, "the browser has ended"
                self._rest += piece
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, address: str, width: int = 1280) -> "Tab":
        return Tab(self, address, width)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)


class Tab:
    def __init__(self, browser: Browser, address: str, width: int):
        self.browser = browser
        target = browser.command("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.command("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        self.do("Page.navigate", url=address)

    def do(self, method: str, **parameters) -> dict:
        return self.browser.command(method, self.session, **parameters)

    def run(self, script: str):
        """The value of a JavaScript expression."""
        answer = self.do(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0):
        """The value of the expression as soon as it is true."""
        ends = time.monotonic() + seconds
        while True:
            try:
                if value := self.run(script):
                    return value
            except Navigated:
                pass  # it is asked again on the next page
            assert time.monotonic() < ends, (
                f"never true: {script}\n{self.run('document.body.innerText')}"
            )
            time.sleep(0.05)

    def say(self, text: str) -> None:
        self.run(f"byId('text').value = {json.dumps(text)}; byId('write').requestSubmit()")

    def click(self, label: str) -> None:
        """The button with this label, as soon as it is there and enabled."""
        find = f"[...document.querySelectorAll('button')].find(b => b.textContent === {json.dumps(label)} && !b.disabled)"
        self.wait(f"Boolean({find})")
        self.run(f"{find}.click()")
