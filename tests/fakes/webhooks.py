"""A webhook's server: stores what it is sent, and answers, refuses or hangs as the test says."""

import contextlib
import json
import threading
from collections.abc import Iterator
from socketserver import ThreadingTCPServer
from typing import Any

from tests.kit.web import Handler, in_a_thread


class Webhook:
    """`code`: the status of the next answers. While `hangs` is set, nothing is answered."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.connections = 0
        self.code = 200
        self.hangs = threading.Event()
        self.arrived = threading.Condition()
        self.released = threading.Event()
        self.url = ""

    def wait_for(self, number: int, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.got) >= number, timeout_s), f"got {self.got}"
        return self.got

    def wait_for_connections(self, number: int, timeout_s: float = 30.0) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.connections >= number, timeout_s)


@contextlib.contextmanager
def webhook(host: str = "127.0.0.1") -> Iterator[Webhook]:
    hook = Webhook()

    class Hook(Handler):
        def do_POST(self) -> None:
            content = json.loads(self.read_body())
            with hook.arrived:
                hook.connections += 1
                hook.arrived.notify_all()
            if hook.hangs.is_set():
                hook.released.wait(60)
                return
            if hook.code < 300:
                with hook.arrived:
                    hook.got.append(content)
                    hook.arrived.notify_all()
            self.answer(b"", hook.code, Location=hook.url)

    # An HTTPServer would ask a name server for its own name.
    server = ThreadingTCPServer((host, 0), Hook)
    server.daemon_threads = True
    hook.url = f"http://{host}:{server.server_address[1]}/T0KEN"
    with in_a_thread(server):
        try:
            yield hook
        finally:
            hook.released.set()
