"""The client's transports: HTTP/1.1 with binary bodies over a connection pool, or gRPC.

Several threads may use both at once. Retrying is safe: inference has no side effects. NVIDIA's clients are not used:
they do not expose an answer's headers, and the one for HTTP is for one thread and has one timeout for all requests.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc

from serin.formats.wire import Array
from serin.machine.unix_http import UnixConnection
from serin.serving.client.address import Address
from serin.serving.client.tensors import HEADER_BYTES, Tensor, grpc_request, http_body, read_http_answer

ID_HEADER = "x-request-id"  # of a request: the client's own id; of an answer: the gateway's


class Unanswered(Exception):
    """Raised when there are no scores. `again`: a retry may succeed (nobody listens, overload, a closed connection).

    `after_s`: the delay that the server requested, if any.
    """

    def __init__(self, status: str, reason: str, *, again: bool = False, after_s: float = 0.0) -> None:
        super().__init__(status, reason)
        self.status, self.reason, self.again, self.after_s = status, reason, again, after_s


@dataclass(frozen=True, slots=True)
class Answer:
    """The outputs by name, and the id that the gateway gave the request; empty when there was no gateway."""

    outputs: dict[str, Array]
    request_id: str


class HttpTransport:
    """A pool of connections. Raises Unanswered and nothing else."""

    def __init__(
        self,
        address: Address,
        model: str,
        version: int | None,
        headers: Mapping[str, str],
        connections: int,
    ) -> None:
        self._address, self._headers = address, dict(headers)
        self._path = f"/v2/models/{model}/versions/{version}" if version else f"/v2/models/{model}"
        self._ssl: ssl.SSLContext | None = address.ssl_context()
        self._kept = connections
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def infer(self, tensors: Sequence[Tensor], headers: Mapping[str, str], timeout_s: float) -> Answer:
        body, head_bytes = http_body(tensors)
        headers = {**headers, HEADER_BYTES: str(head_bytes)}
        answer, data = self._exchange("POST", f"{self._path}/infer", body, headers, timeout_s)
        length = answer.getheader(HEADER_BYTES)
        try:
            outputs = read_http_answer(data, int(length) if length else None)
            return Answer(outputs, answer.getheader(ID_HEADER, ""))
        except ValueError as error:
            raise Unanswered(str(answer.status), f"an answer that cannot be read: {error}") from error

    def metadata(self, timeout_s: float) -> dict[str, Any]:
        answer, data = self._exchange("GET", self._path, None, {}, timeout_s)
        try:
            found: dict[str, Any] = json.loads(data)
        except ValueError as error:
            raise Unanswered(str(answer.status), f"an answer that cannot be read: {error}") from error
        return found

    def events(self, timeout_s: float) -> dict[str, Any]:
        """Returns what an event of the model has and which columns the gateway adds; empty when it adds none."""
        try:
            _, data = self._exchange("GET", f"{self._path}/events", None, {}, timeout_s)
            found: dict[str, Any] = json.loads(data)
            return found
        except Unanswered as error:
            if error.again:
                raise
        except ValueError:
            pass  # another server
        return {}

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
            if self._address.socket is not None:
                return UnixConnection(self._address.socket, timeout_s)
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
    """One channel. Raises Unanswered and nothing else."""

    def __init__(self, address: Address, model: str, version: int | None, headers: Mapping[str, str]) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        if address.tls:
            trusted = grpc.ssl_channel_credentials(address.ca.read_bytes() if address.ca else None)
            self._channel = grpc.secure_channel(str(address), trusted, options=options)
        else:
            self._channel = grpc.insecure_channel(str(address), options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._model, self._version, self._headers = model, version, dict(headers)

    def infer(self, tensors: Sequence[Tensor], headers: Mapping[str, str], timeout_s: float) -> Answer:
        request = grpc_request(self._model, tensors, self._version)
        message, call = self._call(self._stub.ModelInfer, request, timeout_s, headers)
        known = {key: value for key, value in call.initial_metadata() or () if key == ID_HEADER}
        answer = InferResult(message)
        try:
            outputs = {output.name: answer.as_numpy(output.name) for output in message.outputs}
        except (ValueError, TypeError, struct.error) as error:
            raise Unanswered("OK", f"an answer that cannot be read: {error}") from error
        return Answer(outputs, known.get(ID_HEADER, ""))

    def metadata(self, timeout_s: float) -> dict[str, Any]:
        version = str(self._version) if self._version else ""
        request = service_pb2.ModelMetadataRequest(name=self._model, version=version)
        found, _ = self._call(self._stub.ModelMetadata, request, timeout_s, {})
        return {
            part: [_described(tensor) for tensor in getattr(found, part)] for part in ("inputs", "outputs")
        }

    def close(self) -> None:
        self._channel.close()

    def _call(
        self, method: Any, request: Any, timeout_s: float, headers: Mapping[str, str]
    ) -> tuple[Any, Any]:
        metadata = tuple({**self._headers, **headers}.items())
        try:
            answer: tuple[Any, Any] = method.with_call(request, timeout=timeout_s, metadata=metadata)
            return answer
        except grpc.RpcError as error:
            code = error.code()
            again = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
            raise Unanswered(str(code), error.details() or str(code), again=again) from error


def _described(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _seconds(text: str) -> float:
    """Parses the seconds of a header; 0 for a date or an invalid value."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else 0.0


def _reason(data: bytes) -> str:
    text = data.decode("utf-8", "replace").strip()
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:500] or "it gave no reason"
