"""A small server of the KServe v2 protocol (HTTP), as slow and as faulty as a test wants it."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.kit.web import Handler, WebServer, in_a_thread

MODEL = "sentiment"


class KServe(WebServer):
    """`tensors`: the inputs and outputs that it describes. `answer`: makes the answer to a request's body."""

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        datatype: str = "FP32",
        columns: int = 1,
        model: str = MODEL,
        tensors: Mapping[str, Any] | None = None,
        answer: Callable[[bytes], Any] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(_Handler, host)
        self.delay_s, self.model = delay_s, model
        one = {"name": "x", "datatype": datatype, "shape": [-1, columns]}
        self.tensors = tensors or {"inputs": [one], "outputs": [one]}
        output = {"name": "x", "datatype": datatype, "shape": [1, 1], "data": [0.5]}
        self.respond = answer or (lambda _: {"model_name": model, "outputs": [output]})
        self.ready = True
        self.platform = ""
        self.fails_every = 0  # of so many requests one is answered with 500; 0: none
        self.asked = 0
        self.posted: list[tuple[str, str]] = []  # path and host

    @property
    def address(self) -> str:
        return f"{self.server_address[0]!s}:{self.server_port}"


class _Handler(Handler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: else every answer waits 40 ms for an acknowledgement
    disable_nagle_algorithm = True
    server: KServe

    def do_GET(self) -> None:
        if not self.server.ready:
            self._answer(503, {"error": "not ready"})
        elif self.path == f"/v2/models/{self.server.model}":
            platform = {"platform": self.server.platform} if self.server.platform else {}
            self._answer(200, {"name": self.server.model, **platform, **self.server.tensors})
        else:
            self._answer(200, {})

    def do_POST(self) -> None:
        body = self.read_body()
        self.server.asked += 1
        self.server.posted.append((self.path, self.headers["host"]))
        time.sleep(self.server.delay_s)
        if self.server.fails_every and self.server.asked % self.server.fails_every == 0:
            self._answer(500, {"error": "out of order"})
            return
        self._answer(200, self.server.respond(body))

    def _answer(self, status: int, body: Any) -> None:
        self.answer(json.dumps(body).encode(), status, content_type="application/json")


@contextmanager
def serving(**how: Any) -> Iterator[KServe]:
    with in_a_thread(KServe(**how)) as server:
        yield server
