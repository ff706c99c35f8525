"""A gateway with servers behind it that answer every call, and an OpenID provider on loopback that makes tokens."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import jwt
import tritonclient.grpc
from cryptography.hazmat.primitives.asymmetric import rsa
from tritonclient.utils import InferenceServerException

from serin.serving.envoy.gateway import Gateway
from serin.serving.envoy.keys import KeyFile
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.serving_host import ChildHost
from tests.e2e.serving_stack import lone_gateway
from tests.kit.web import Handler, WebServer, web_server
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA, infer_inputs

OTHER = "other"
AUDIENCE = "models"


class Provider:
    """An OpenID provider: discovery, a key set that can be rotated, and an answer that can be taken away."""

    def __init__(self) -> None:
        self.asked = 0
        self.down = False
        self.keys: dict[str, rsa.RSAPrivateKey] = {}
        self.rotate("first")
        provider = self

        class Answers(Handler):
            def do_GET(self) -> None:
                provider.asked += 1
                document = json.dumps(provider.document(self.path)).encode()
                self.answer(document, 503 if provider.down else 200)

        self._server = WebServer(Answers)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def document(self, path: str) -> object:
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        return self.jwks()

    def jwks(self) -> dict[str, Any]:
        return {"keys": [public_jwk(key, name) for name, key in self.keys.items()]}

    def rotate(self, name: str) -> None:
        """From now on there is another key alone."""
        self.keys = {name: rsa.generate_private_key(public_exponent=65537, key_size=2048)}

    def token(self, subject: str = "alice", **claims: Any) -> str:
        """A claim that is None is left out."""
        ((name, key),) = self.keys.items()
        return sign(key, name, {**self.claims(subject), **claims})

    def claims(self, subject: str) -> dict[str, Any]:
        now = int(time.time())
        return {"iss": self.url, "aud": AUDIENCE, "sub": subject, "iat": now, "exp": now + 600}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def sign(key: rsa.RSAPrivateKey, name: str, claims: dict[str, Any]) -> str:
    told = {claim: value for claim, value in claims.items() if value is not None}
    return jwt.encode(told, key, "RS256", headers={"kid": name})


def public_jwk(key: rsa.RSAPrivateKey, name: str) -> dict[str, Any]:
    found = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**found, "kid": name, "alg": "RS256", "use": "sig"}


@dataclass
class Scene:
    """`heard`: the headers of every request that reached a server."""

    gateway: Gateway
    port: int
    host: ChildHost
    keys: KeyFile
    provider: Provider
    place: Endpoint
    heard: list[dict[str, str]] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.gateway.folder.parent

    def route(self, **limits: Timeouts) -> None:
        """Two models lead to the same servers."""
        routes, places = [], {}
        for model in (MODEL, OTHER):
            release = Release(model=model, version=1)
            routes.append(ModelRoute(model=model, epoch=1, stable=release))
            places[release.name] = self.place
        self.gateway.apply(routes, places, {MODEL: Timeouts(), **limits})

    def ask(
        self, secret: str | None = None, *more: str, model: str = MODEL
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Status, text and headers of an inference by HTTP; `more`: further authorization headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.putrequest("POST", f"/v2/models/{model}/infer")
            for each in (secret, *more):
                if each is not None:
                    connection.putheader("authorization", f"Bearer {each}")
            connection.putheader("content-length", "2")
            connection.endheaders(b"{}")
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            connection.close()

    def call(self, secret: str | None = None, *, model: str = MODEL) -> str:
        """The status of an inference by gRPC, and its message."""
        headers = {"authorization": f"Bearer {secret}"} if secret else None
        with tritonclient.grpc.InferenceServerClient(
            f"127.0.0.1:{self.port}", channel_args=[("grpc.use_local_subchannel_pool", 1)]
        ) as client:
            try:
                client.infer(model, infer_inputs(tritonclient.grpc, bundles.rows(1), SCHEMA), headers=headers)
            except InferenceServerException as error:
                return f"{str(error.status()).removeprefix('StatusCode.')}: {error.message()}"
        return "OK"

    def statuses(self, secret: str | None, **where: str) -> tuple[int, str]:
        """Status of the same inference by HTTP and gRPC."""
        return self.ask(secret, **where)[0], self.call(secret, **where).split(":")[0]


@contextmanager
def hearing() -> Iterator[tuple[Endpoint, list[dict[str, str]]]]:
    """A server that answers every inference by HTTP and gRPC, and the headers of each that it was given."""
    heard: list[dict[str, str]] = []

    class Web(Handler):
        def do_POST(self) -> None:
            heard.append({name.lower(): value for name, value in self.headers.items()})
            self.read_body()
            self.answer()

    class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            heard.append(dict(details.invocation_metadata))
            return grpc.unary_unary_rpc_method_handler(lambda request, _: b"")

    calls = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Calls()])
    port = calls.add_insecure_port("127.0.0.1:0")
    calls.start()
    try:
        with web_server(Web) as web:
            yield Endpoint(http=f"127.0.0.1:{web}", grpc=f"127.0.0.1:{port}"), heard
    finally:
        calls.stop(None).wait()


@contextmanager
def token_scene() -> Iterator[Scene]:
    provider = Provider()
    try:
        with hearing() as (place, heard), lone_gateway() as (gateway, port, host):
            keys = KeyFile(
                path=gateway.folder.parent / "keys.json", published=gateway.folder / "keys" / "keys.json"
            )
            scene = Scene(gateway, port, host, keys, provider, place, heard)
            scene.route()
            yield scene
    finally:
        provider.close()
