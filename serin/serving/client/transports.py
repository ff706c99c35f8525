"""How the client's tensors travel: HTTP/1.1 with binary bodies over a pool of connections, or one gRPC channel.

Both may be used by several threads at once. Asking again is safe: inference changes nothing.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2

from serin.formats.wire import Array
from serin.serving.client.address import Address
from serin.serving.client.tensors import (
    HEADER_BYTES,
    INFER_METHOD,
    METADATA_METHOD,
    Tensor,
    grpc_message,
    http_body,
    read_grpc_answer,
    read_http_answer,
)


class Unanswered(Exception):
    """No scores. `again`: another try may get some (nobody listens, overload, a connection that was closed), best after
    `after_s`, where the server said so."""

    def __init__(self, status: str, reason: str, *, again: bool = False, after_s: float = 0.0) -> None:
        super().__init__(status, reason)
        self.status, self.reason, self.again, self.after_s = status, reason, again, after_s


class Transport(Protocol):
    """Raises Unanswered and nothing else."""

    def infer(
        self, model: str, version: int | None, tensors: Iterable[Tensor], timeout_s: float
    ) -> dict[str, Array]: ...

    def metadata(self, model: str, version: int | None, timeout_s: float) -> dict[str, Any]: ...

    def close(self) -> None: ...


class HttpTransport:
    def __init__(self, address: Address, headers: Mapping[str, str], connections: int) -> None:
        self._address, self._headers = address, dict(headers)
        self._ssl: ssl.SSLContext | None = address.ssl_context()
        self._kept = connections
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def infer(
        self, model: str, version: int | None, tensors: Iterable[Tensor], timeout_s: float
    ) -> dict[str, Array]:
        body, head_bytes = http_body(tensors)
        path = f"{_path(model, version)}/infer"
        answer, data = self._exchange("POST", path, body, {HEADER_BYTES: str(head_bytes)}, timeout_s)
        length = answer.getheader(HEADER_BYTES)
        try:
            return read_http_answer(data, int(length) if length else None)
        except ValueError as error:
            raise Unanswered(str(answer.status), f"what cannot be read: {error}") from error

    def metadata(self, model: str, version: int | None, timeout_s: float) -> dict[str, Any]:
        answer, data = self._exchange("GET", _path(model, version), None, {}, timeout_s)
        try:
            found: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise Unanswered(str(answer.status), f"what cannot be read: {error}") from error
        return found

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = self._take(timeout_s)
        try:
            connection.request(method, path, body, {**self._headers, **headers})
            answer = connection.getresponse()
            data = answer.read()
        except TimeoutError as error:
            connection.close()
            reason = f"{self._address} has not answered within {timeout_s:.3g} s"
            raise Unanswered("nothing", reason) from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = f"{self._address}: {str(error) or type(error).__name__}"
            raise Unanswered("nothing", reason, again=not isinstance(error, ssl.SSLError)) from error
        self._give_back(connection)
        if answer.status != 200:
            after_s = _seconds(answer.getheader("retry-after", ""))
            again = answer.status in (429, 502, 503)
            raise Unanswered(str(answer.status), _reason(data), again=again, after_s=after_s)
        return answer, data

    def _take(self, timeout_s: float) -> http.client.HTTPConnection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            host, port = self._address.host, self._address.port
            if self._ssl is not None:
                return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._ssl)
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < self._kept:
                self._idle.append(connection)
                return
        connection.close()


class GrpcTransport:
    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        if address.tls:
            trusted = address.ca.read_bytes() if address.ca else None
            credentials = grpc.ssl_channel_credentials(trusted)
            self._channel = grpc.secure_channel(str(address), credentials, options=options)
        else:
            self._channel = grpc.insecure_channel(str(address), options=options)
        self._metadata = tuple(headers.items())
        self._infer = self._channel.unary_unary(INFER_METHOD)
        self._describe = self._channel.unary_unary(METADATA_METHOD)

    def infer(
        self, model: str, version: int | None, tensors: Iterable[Tensor], timeout_s: float
    ) -> dict[str, Array]:
        answer = self._call(self._infer, grpc_message(model, tensors, version), timeout_s)
        try:
            return read_grpc_answer(answer)
        except ValueError as error:
            raise Unanswered("OK", f"what cannot be read: {error}") from error

    def metadata(self, model: str, version: int | None, timeout_s: float) -> dict[str, Any]:
        asked = service_pb2.ModelMetadataRequest(name=model, version=str(version) if version else "")
        answer = self._call(self._describe, asked.SerializeToString(), timeout_s)
        found = service_pb2.ModelMetadataResponse.FromString(answer)
        listed = {"inputs": found.inputs, "outputs": found.outputs}
        return {
            part: [
                {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in tensors
            ]
            for part, tensors in listed.items()
        }

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: Any, message: bytes, timeout_s: float) -> bytes:
        try:
            answer: bytes = method(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()
            again = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
            raise Unanswered(str(code), error.details() or code.name, again=again) from error
        return answer


def _path(model: str, version: int | None) -> str:
    return f"/v2/models/{model}/versions/{version}" if version else f"/v2/models/{model}"


def _seconds(text: str) -> float:
    """0 for a date, or for what is none."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else 0.0


def _reason(data: bytes) -> str:
    text = data.decode("utf-8", "replace").strip()
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:500] or "it says nothing more"
