"""A server as the benchmark sees it: its requests (JSON, binary tensors or plain bytes) and its answers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.child import ContenderFailed
from benchmarks.race import Role
from benchmarks.serving import model
from serin.serving.client.address import Address
from serin.serving.client.client import predict
from serin.serving.tuning.load import http_request
from serin.serving.tuning.load_connections import Target
from tests.kit.load import json_target, model_target

DIFFERENT_ROWS = 64

Seconds = Callable[[], float]
Scores = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server under test.

    `target(rows)` makes requests of so many rows; `answer` is the answer to the first eight. `cpu_s` counts all its
    processes, `proxy_s` only the Envoy in front of it, where there is one.
    """

    role: Role
    target: Callable[[int], Target]
    answer: Callable[[], Scores]
    cpu_s: Seconds
    url: str
    proxy_s: Seconds = lambda: 0.0
    package: str = "serin"


def tensors(
    url: str,
    protocol: Any,
    role: Role,
    cpu_s: Seconds,
    *,
    proxy_s: Seconds = lambda: 0.0,
    version: int | None = None,
) -> Server:
    """Returns a server that is called with the binary tensors of the Open Inference Protocol, over HTTP or gRPC."""
    return Server(
        role=role,
        target=lambda count: model_target(
            url, model.NAME, model.rows(DIFFERENT_ROWS * count), model.SCHEMA, protocol=protocol,
            rows_per_request=count, version=version,
        ),
        answer=lambda: predict(url, model.NAME, model.rows(8), model.SCHEMA, protocol, version)["score"].reshape(-1),
        cpu_s=cpu_s,
        url=url,
        proxy_s=proxy_s,
    )  # fmt: skip


def json_documents(
    role: Role,
    url: str,
    path: str,
    body: Callable[[model.Columns], Any],
    read: Callable[[Any], list[float]],
    cpu_s: Seconds,
    package: str = "serin",
) -> Server:
    def answer() -> Scores:
        sent = json.dumps(body(model.rows(8))).encode()
        return np.array(read(json.loads(_post(url, path, sent, "application/json"))))

    return Server(
        role=role,
        target=lambda count: json_target(url, path, [body(part) for part in _requests(count)]),
        answer=answer,
        cpu_s=cpu_s,
        url=url,
        package=package,
    )


def plain_bytes(
    role: Role,
    url: str,
    path: str,
    body: Callable[[model.Columns], bytes],
    cpu_s: Seconds,
    package: str,
) -> Server:
    """Returns a server that is called with plain bytes and answers with float32 scores."""
    kind = "application/octet-stream"

    def target(count: int) -> Target:
        address = Address.parse(url)
        requests = (
            http_request(address, path, body(part), {"content-type": kind}) for part in _requests(count)
        )
        return Target(address=address, requests=tuple(requests))

    def answer() -> Scores:
        return np.frombuffer(_post(url, path, body(model.rows(8)), kind), "<f4")

    return Server(role=role, target=target, answer=answer, cpu_s=cpu_s, url=url, package=package)


def _requests(count: int) -> list[model.Columns]:
    columns = model.rows(DIFFERENT_ROWS * count)
    starts = range(0, DIFFERENT_ROWS * count, count)
    return [{name: each[start : start + count] for name, each in columns.items()} for start in starts]


def _post(url: str, path: str, body: bytes, kind: str) -> bytes:
    connection = http.client.HTTPConnection(url, timeout=30)
    try:
        connection.request("POST", path, body, {"content-type": kind})
        answer = connection.getresponse()
        found = answer.read()
        if answer.status != 200:
            raise ContenderFailed(f"{url}{path} answers {answer.status}: {found[:500]!r}")
        return found
    finally:
        connection.close()
