"""A real Chromium, without a window, spoken to by its own protocol: what a person would see, and a picture of it."""

import base64
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.kit.waiting import running, tail, until
from tests.kit.web import ask
from tests.signals import send_group

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_START_S = 60.0
_ANSWER_S = 300.0  # while a page is being fetched the browser answers nothing


def find_browser() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class _Moved(Exception):
    """The page that was asked is being left for another."""


class Page:
    """One page of the browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=_ANSWER_S))
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"].get("text")))
            if (
                message.get("method") == "Log.entryAdded"
                and message["params"]["entry"]["source"] == "security"
            ):
                self.complaints.append(str(message["params"]["entry"]["text"]))
            if message.get("id") == self._number:
                problem = message.get("error", {}).get("message", "")
                if any(word in problem for word in ("context", "navigated")):
                    raise _Moved(problem)
                assert "error" not in message, f"{method}: {message['error']}"
                found: dict[str, Any] = message["result"]
                return found

    def run(self, script: str) -> Any:
        """The value of an expression in the page; while one is left for another, in the next."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                answer = self.call(
                    "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
                )
                break
            except _Moved:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def wait_for(self, *words: str, seconds: float = 60.0) -> str:
        """All that can be read, once `words` are among it."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.text()
            if all(word in shown for word in words):
                return shown
            assert time.monotonic() < deadline, (
                f"{words} not on the page within {seconds:.0f} s, but: {shown[:2000]}"
            )
            time.sleep(0.1)

    def wait_until(self, script: str, what: str, *, seconds: float = 60.0) -> None:
        until(lambda: self.run(script), what, within_s=seconds, every_s=0.1, said=lambda: self.text()[:2000])

    def type_into(self, selector: str, text: str) -> None:
        """Replaces what is there."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait_until(f"(e => !!e && (e.focus(), e.select(), true))({found})", selector)
        self.call("Input.insertText", text=text)

    def press(self, label: str) -> None:
        """What says `label`, and nothing else: a button, a tab, a link."""
        plain = "e.childElementCount === 0 || e.tagName === 'BUTTON'"  # a button may have a picture
        said = f"e => ({plain}) && e.textContent.trim() === {json.dumps(label)}"
        find = f"[...document.querySelectorAll('main *, form *, body *')].filter({said}).at(-1)"
        # In one call: the page may draw itself anew after any.
        self.wait_until(f"(e => !!e && (e.click(), true))({find})", label)

    def picture(self, file: Path) -> bytes:
        png = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(png)
        return png


@contextmanager
def open_browser(program: str, folder: Path) -> Iterator[Page]:
    """An empty page in a browser with a profile of its own, which has ended afterwards."""
    folder.mkdir(parents=True)  # an old one holds the port of another browser
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                "--window-size=1400,1600", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        with connect(_page_address(process, folder), max_size=None, proxy=None) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log"):
                page.call(f"{domain}.enable")
            yield page
    finally:
        send_group(signal.SIGKILL, process.pid)  # its helpers are in its group
        process.wait()


def _page_address(process: subprocess.Popen[bytes], folder: Path) -> str:
    place, how = folder / "profile" / "DevToolsActivePort", {"within_s": _START_S, "alive": running(process)}
    until(
        lambda: place.exists() and "\n" in place.read_text(),
        "a browser",
        said=tail(folder / "browser.log"),
        **how,
    )
    port = int(place.read_text().splitlines()[0])

    def pages() -> list[Any]:
        return [found for found in json.loads(ask(port, "/json/list").text) if found["type"] == "page"]

    return str(until(pages, "a page in the browser", **how)[0]["webSocketDebuggerUrl"])
