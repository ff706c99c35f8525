"""A load generator: closed loop (each client sends its next request when the last one is answered).

In a closed loop a slow server is asked less often, so its latencies look better than those of independent users would.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException

from serin.formats.schema import Schema
from serin.formats.wire import Array
from serin.serving.client import Protocol as WireProtocol
from serin.serving.client import infer_inputs, request_columns

NO_ANSWER = "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """`outcomes` counts status codes ("200", "OK", "UNAVAILABLE", "no answer"); `latencies_ms` are of the good ones."""

    seconds: float
    outcomes: dict[str, int]
    latencies_ms: Array

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def failed(self) -> int:
        return self.requests - len(self.latencies_ms)

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    def quantile_ms(self, share: float) -> float:
        """NaN when nothing was answered."""
        return float(np.quantile(self.latencies_ms, share)) if len(self.latencies_ms) else float("nan")


@dataclass(slots=True)
class _Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


class _Asker(Protocol):
    """One client: sends the request with this number, gives the status."""

    async def ask(self, number: int) -> str: ...

    async def close(self) -> None: ...


def run_load(
    url: str,
    model: str,
    rows: Mapping[str, Array],
    schema: Schema,
    *,
    protocol: WireProtocol = "http",
    clients: int = 4,
    seconds: float = 5.0,
    rows_per_request: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> LoadResult:
    """Asks until `seconds` have passed or `stop` says so; requests under way are waited for."""
    columns = request_columns(rows, schema)
    count = len(next(iter(columns.values())))
    starts = range(0, max(count - rows_per_request, 0) + 1, rows_per_request)
    batches = [
        {name: values[start : start + rows_per_request] for name, values in columns.items()}
        for start in starts[:256]
    ]
    address = url.removeprefix("http://").rstrip("/")
    tally = _Tally()
    started = time.perf_counter()
    end = started + seconds

    async def everybody() -> None:
        make = _HttpAsker if protocol == "http" else _GrpcAsker
        askers: list[_Asker] = [make(address, model, batches, schema) for _ in range(clients)]
        again = lambda: time.perf_counter() < end and not stop()  # noqa: E731
        await asyncio.gather(
            *(_loop(asker, offset, len(batches), again, tally) for offset, asker in enumerate(askers))
        )

    asyncio.run(everybody())
    return LoadResult(
        seconds=time.perf_counter() - started,
        outcomes=dict(tally.outcomes),
        latencies_ms=np.array(tally.seconds) * 1000,
    )


async def _loop(asker: _Asker, offset: int, count: int, again: Callable[[], bool], tally: _Tally) -> None:
    numbers = cycle([*range(offset % count, count), *range(offset % count)])
    while again():
        before = time.perf_counter()
        status = await asker.ask(next(numbers))
        tally.outcomes[status] += 1
        if status in ("200", "OK"):
            tally.seconds.append(time.perf_counter() - before)
        elif status == NO_ANSWER:
            await asyncio.sleep(0.01)  # not a busy loop against a closed port
    await asker.close()


class _HttpAsker:
    """HTTP/1.1 by hand on one connection: what is measured is the server, not a client library."""

    def __init__(self, address: str, model: str, batches: list[dict[str, Array]], schema: Schema) -> None:
        self._host, _, port = address.partition(":")
        self._port = int(port or 80)
        self._requests = [_http_request(address, model, batch, schema) for batch in batches]
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, number: int) -> str:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._streams
            writer.write(self._requests[number])
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            status, *lines = head.decode("latin-1").lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines if line)
            await reader.readexactly(int(headers.get("content-length", 0)))
            if headers.get("connection") == "close":
                await self.close()
            return status.split()[1]
        except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
            await self.close()
            return NO_ANSWER

    async def close(self) -> None:
        if self._streams:
            self._streams[1].close()
            self._streams = None


class _GrpcAsker:
    def __init__(self, address: str, model: str, batches: list[dict[str, Array]], schema: Schema) -> None:
        # A channel of its own, as a client of its own would have.
        apart = [("grpc.use_local_subchannel_pool", 1)]
        self._client = tritonclient.grpc.aio.InferenceServerClient(address, channel_args=apart)
        self._model = model
        self._inputs = [infer_inputs(tritonclient.grpc, batch, schema) for batch in batches]

    async def ask(self, number: int) -> str:
        try:
            await self._client.infer(self._model, self._inputs[number], client_timeout=30.0)
        except InferenceServerException as error:
            return str(error.status() or NO_ANSWER).removeprefix("StatusCode.")
        return "OK"

    async def close(self) -> None:
        await self._client.close()


def _http_request(address: str, model: str, batch: Mapping[str, Array], schema: Schema) -> bytes:
    inputs: list[Any] = infer_inputs(tritonclient.http, batch, schema)
    body, json_bytes = tritonclient.http.InferenceServerClient.generate_request_body(inputs)
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", f"host: {address}", f"content-length: {len(body)}"]
    if json_bytes is not None:
        lines.append(f"inference-header-content-length: {json_bytes}")
    return "\r\n".join([*lines, "", ""]).encode() + bytes(body)
