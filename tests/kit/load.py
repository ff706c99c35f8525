"""Requests for the load generator that `serin tune` does not send: gRPC, TLS, JSON, versions and headers."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

from serin.formats.schema import Schema
from serin.formats.wire import Array
from serin.serving.client.address import Address
from serin.serving.client.tensors import HEADER_BYTES, Tensor, grpc_request, http_body
from serin.serving.tuning.load import http_request, request_tensors
from serin.serving.tuning.load_connections import Connection, Done, Target

INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"


def model_target(
    url: str,
    model: str,
    rows: Mapping[str, Array],
    schema: Schema,
    *,
    protocol: Literal["http", "grpc"] = "http",
    rows_per_request: int = 1,
    version: int | None = None,
    headers: Mapping[str, str] | None = None,
    ca: Path | str | None = None,
    timeout_s: float = 30.0,
) -> Target:
    """Requests with binary tensors, made from `rows` (wire form), `rows_per_request` of them in each."""
    batches = request_tensors(rows, schema, rows_per_request)
    address = Address.parse(url, ca=ca)
    if protocol == "grpc":
        messages = tuple(grpc_message(model, batch, version) for batch in batches)
        metadata = tuple((headers or {}).items())
        return GrpcTarget(address=address, requests=messages, metadata=metadata, timeout_s=timeout_s)
    requests = []
    path = f"/v2/models/{model}/versions/{version}/infer" if version else f"/v2/models/{model}/infer"
    for batch in batches:
        body, head_bytes = http_body(batch)
        extra = {**(headers or {}), HEADER_BYTES: str(head_bytes)}
        requests.append(http_request(address, path, body, extra))
    return Target(address=address, requests=tuple(requests), timeout_s=timeout_s)


def grpc_message(model: str, tensors: Iterable[Tensor], version: int | None = None) -> bytes:
    return bytes(grpc_request(model, tensors, version).SerializeToString())


def json_target(url: str, path: str, bodies: Sequence[Any], *, timeout_s: float = 30.0) -> Target:
    """The same JSON documents that any HTTP client would post."""
    address = Address.parse(url)
    kind = {"content-type": "application/json"}
    requests = tuple(http_request(address, path, json.dumps(body).encode(), kind) for body in bodies)
    return Target(address=address, requests=requests, timeout_s=timeout_s)


class GrpcConnection:
    """One gRPC channel, as an independent client would have."""

    def __init__(self, target: "GrpcTarget") -> None:
        self._target = target
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        address = target.address
        if address.tls:
            trusted = grpc.ssl_channel_credentials(address.ca.read_bytes() if address.ca else None)
            self._channel = grpc.aio.secure_channel(str(address), trusted, options=options)
        else:
            self._channel = grpc.aio.insecure_channel(str(address), options=options)
        self._ask = self._channel.unary_unary(INFER_METHOD)
        self._call: asyncio.Task[None] | None = None

    def send(self, number: int, done: Done) -> None:
        self._call = asyncio.get_running_loop().create_task(self._answer(self._target.requests[number], done))

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def _answer(self, request: bytes, done: Done) -> None:
        target = self._target
        try:
            await self._ask(request, timeout=target.timeout_s, metadata=target.metadata)
        except grpc.aio.AioRpcError as error:
            done(error.code().name)
        else:
            done("OK")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcTarget(Target):
    """Messages for ModelInfer. `metadata`: with each call."""

    metadata: tuple[tuple[str, str], ...] = ()
    connect: Callable[[Any], Connection] = GrpcConnection
