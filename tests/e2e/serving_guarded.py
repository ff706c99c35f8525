"""A stack behind TLS and keys, with clients that ask it in every way."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import tritonclient.grpc
from cryptography import x509
from tritonclient.utils import InferenceServerException

from serin.serving.envoy.keys import KeyFile
from serin.serving.envoy.tls import TlsFiles
from tests.e2e.serving_certificates import Authority
from tests.e2e.serving_stack import Stack, good_inputs, running_stack
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA, infer_inputs

INFER = f"/v2/models/{MODEL}/infer"
BODY = json.dumps({"inputs": good_inputs()}).encode()


@dataclass
class GuardedGateway:
    """A stack behind TLS, and clients that trust its authority."""

    stack: Stack
    files: TlsFiles
    authority: Authority
    keys: KeyFile
    made: list[str] = field(default_factory=list)  # keys, which must stand nowhere

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.authority.certificate.decode())

    def connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.stack.port, context=self.context(), timeout=15)

    def ask(self, path: str = INFER, key: str | None = None, method: str = "POST") -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        connection = self.connection()
        try:
            connection.request(method, path, BODY if method == "POST" else None, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith("{") else text
        finally:
            connection.close()

    def grpc_client(self) -> Any:
        trusted = grpc.ssl_channel_credentials(root_certificates=self.authority.certificate)
        return tritonclient.grpc.InferenceServerClient(
            self.stack.url,
            creds=trusted,
            ssl=True,
            channel_args=[("grpc.use_local_subchannel_pool", 1)],  # each a connection of its own
        )

    def call(self, key: str | None = None, model: str = MODEL) -> str:
        """The status of an inference by gRPC."""
        with self.grpc_client() as client:
            try:
                inputs = infer_inputs(tritonclient.grpc, bundles.rows(1), SCHEMA)
                client.infer(model, inputs, headers={"authorization": f"Bearer {key}"} if key else None)
            except InferenceServerException as error:
                return f"{str(error.status()).removeprefix('StatusCode.')}: {error.message()}"
        return "OK"

    def shown_serial(self) -> int:
        pem = ssl.get_server_certificate(("127.0.0.1", self.stack.port), timeout=10)
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    def make_key(self, name: str, **settings: Any) -> str:
        _, key = self.keys.create(name, **settings)
        self.made.append(key)
        self.stack.gateway.keys.follow()
        return key


@contextmanager
def guarded_gateway() -> Iterator[GuardedGateway]:
    folder, authority = Path(tempfile.mkdtemp(prefix="serin-tls-")), Authority()
    files = TlsFiles(certificate=folder / "cert.pem", key=folder / "key.pem")
    authority.pair().write(files.certificate, files.key)
    try:
        with running_stack(tls=files) as stack:
            yield GuardedGateway(stack, files, authority, KeyFile(path=stack.folder / "keys.json"))
    finally:
        shutil.rmtree(folder)


class Clients:
    """Ask all the time until the block ends: on one connection each, or on a new one for every request."""

    def __init__(self, endpoint: GuardedGateway) -> None:
        self.answered: dict[str, int] = {}
        self.failed: list[str] = []
        self._gateway, self._done = endpoint, threading.Event()
        kinds = {"kept": self._kept, "new": self._new, "grpc kept": self._grpc, "grpc new": self._grpc_new}
        self._threads = [threading.Thread(target=self._run, args=item) for item in kinds.items()]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, name: str, ask: Callable[[], Iterator[str]]) -> None:
        try:
            for status in ask():
                if status not in ("200", "OK"):
                    self.failed.append(f"{name}: {status}")
                self.answered[name] = self.answered.get(name, 0) + 1
                if self._done.is_set():
                    return
        except (OSError, http.client.HTTPException) as error:
            self.failed.append(f"{name}: {error!r}")

    def _kept(self) -> Iterator[str]:
        connection = self._gateway.connection()
        while True:
            connection.request("POST", INFER, BODY)
            answer = connection.getresponse()
            answer.read()
            assert not answer.will_close
            yield str(answer.status)

    def _new(self) -> Iterator[str]:
        while True:
            yield str(self._gateway.ask()[0])

    def _grpc(self) -> Iterator[str]:
        inputs = infer_inputs(tritonclient.grpc, bundles.rows(1), SCHEMA)
        with self._gateway.grpc_client() as client:
            while True:
                try:
                    client.infer(MODEL, inputs)
                    yield "OK"
                except InferenceServerException as error:
                    yield str(error)

    def _grpc_new(self) -> Iterator[str]:
        while True:
            yield self._gateway.call()
