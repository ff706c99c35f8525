"""The guarded endpoint: TLS whose certificate changes under load, and API keys that come and go without a restart."""

import http.client
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serin.errors import TlsUnfit
from serin.serving.client.client import predict
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.store.artifacts import ModelRoute, Release
from tests.e2e.serving_guarded import BODY, INFER, Clients, GuardedGateway, guarded_gateway
from tests.e2e.serving_host import wait_for
from tests.e2e.token_scene import hearing
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA


@pytest.fixture(scope="module")
def endpoint() -> Iterator[GuardedGateway]:
    with guarded_gateway() as opened:
        yield opened


# TLS


def test_http_1_http_2_and_grpc_are_answered_over_tls_and_plain_text_is_not(endpoint: GuardedGateway) -> None:
    for http1, version in ((True, "HTTP/1.1"), (False, "HTTP/2")):
        with httpx.Client(verify=endpoint.context(), http1=http1, http2=not http1) as client:
            answer = client.post(f"https://{endpoint.stack.url}{INFER}", content=BODY)
            assert (answer.status_code, answer.http_version) == (200, version)
    assert endpoint.call() == "OK"
    with pytest.raises((http.client.HTTPException, OSError)):
        endpoint.stack.ask("POST", INFER, BODY)
    for old in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        context = endpoint.context()
        with pytest.warns(DeprecationWarning, match="deprecated"):
            context.minimum_version = context.maximum_version = old
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(
                socket.create_connection(("127.0.0.1", endpoint.stack.port)), server_hostname="localhost"
            )


def test_the_certificate_is_changed_under_load_without_a_dropped_request(endpoint: GuardedGateway) -> None:
    """By rename, in place, and one file after the other with a look at the half-changed pair in between."""
    gateway, files = endpoint.stack.gateway, endpoint.files
    pid = endpoint.stack.host.pid(PROCESS_NAME)

    def by_rename(pair: Any) -> None:
        pair.write(files.certificate, files.key)

    def in_place(pair: Any) -> None:
        files.certificate.write_bytes(pair.certificate)
        files.key.write_bytes(pair.key)

    def half_and_half(pair: Any) -> None:
        files.certificate.write_bytes(pair.certificate)
        with pytest.raises(TlsUnfit, match="they do not belong together"):
            gateway.tls.follow()
        files.key.write_bytes(pair.key)

    with Clients(endpoint) as clients:
        for change in (by_rename, in_place, half_and_half):
            pair, before = endpoint.authority.pair(), dict(clients.answered)
            change(pair)
            gateway.tls.follow()  # as the controller does every half second
            wait_for(
                "the new certificate",
                lambda pair=pair: endpoint.shown_serial() == pair.serial,
                endpoint.stack.host,
            )
            wait_for(
                "more requests",
                lambda before=before: (
                    (
                        not clients.failed
                        and len(clients.answered) == 4
                        and all(count >= before.get(name, 0) + 3 for name, count in clients.answered.items())
                    )
                    or bool(clients.failed)
                ),
                endpoint.stack.host,
            )
    print(f"answered while three certificates came: {clients.answered}")
    assert clients.failed == []
    assert endpoint.stack.host.pid(PROCESS_NAME) == pid


def test_a_pair_that_cannot_be_used_is_said_once_and_the_old_one_stays(endpoint: GuardedGateway) -> None:
    gateway, files = endpoint.stack.gateway, endpoint.files
    gateway.tls.follow()
    serial, good = endpoint.shown_serial(), files.key.read_bytes()
    for bad, words in (
        (endpoint.authority.pair(passphrase=b"secret").key, "has a passphrase"),
        (b"nonsense", "not a PEM"),
    ):
        files.key.write_bytes(bad)
        with pytest.raises(TlsUnfit, match=words):
            gateway.tls.follow()
        gateway.tls.follow()
    assert endpoint.shown_serial() == serial
    files.key.write_bytes(good)
    gateway.tls.follow()
    assert gateway.admin.certificate_days() in (1, 2)


# keys


def test_keys_open_their_models_until_they_expire_or_are_revoked(endpoint: GuardedGateway) -> None:
    """One story: what is refused depends on what was made before."""
    gateway, host = endpoint.stack.gateway, endpoint.stack.host
    pid = host.pid(PROCESS_NAME)
    assert endpoint.ask()[0] == 200, "no key was made yet"

    everything, ours = (
        endpoint.make_key("everything"),
        endpoint.make_key("ours", models=["and-another", f"{MODEL[:3]}*"]),
    )
    near = ["another", MODEL[:-1], f"{MODEL}-*", f"x{MODEL[:2]}*"]  # names are compared whole without a *
    others, brief = endpoint.make_key("others", models=near), endpoint.make_key("brief", lasts_s=0.2)
    missing = "a key is needed: send the header 'authorization: Bearer <key>'"
    wait_for("the first refusal", lambda: endpoint.ask() == (401, {"error": missing}), host)
    for key in (everything, ours):
        assert endpoint.ask(key=key)[0] == 200
        assert endpoint.call(key) == "OK"
        assert endpoint.ask(f"/v2/models/{MODEL}/ready", key, "GET")[0] == 200
    assert endpoint.call() == f"UNAUTHENTICATED: {missing}"
    unknown = "this key is not known here, or was revoked"
    wrong = (ours[:-1] + ("a" if ours[-1] != "a" else "b"), ours[:-1], f"{ours}x", "x" * 49, "Basic")
    for key in wrong:
        assert endpoint.ask(key=key) == (401, {"error": unknown})
        assert endpoint.call(key) == f"UNAUTHENTICATED: {unknown}"
    foreign = "this key may not ask for this model"
    spellings = (
        f"//v2/models/{MODEL}/infer",
        f"/v2/models/x/../{MODEL}/infer",
        f"/v2/models/{MODEL}?x=another",
    )
    for path in (INFER, f"/v2/models/{MODEL}/versions/1/infer", f"/v2/models/{MODEL}", *spellings):
        assert endpoint.ask(path, others) == (403, {"error": foreign}), path
    assert endpoint.call(others) == f"PERMISSION_DENIED: {foreign}"
    assert endpoint.ask("/v2/models/another/infer", others)[0] == 404, "it may, and there is none"
    wait_for("its end", lambda: endpoint.ask(key=brief) == (401, {"error": "this key has expired"}), host)
    assert endpoint.call(brief) == "UNAUTHENTICATED: this key has expired"

    for path in ("/v2", "/metrics", "/v2/repository/index"):
        assert endpoint.ask(path)[0] == 401, "nobody learns what there is"
    assert endpoint.ask("/v2/health/live", method="GET")[0] == 200
    with endpoint.grpc_client() as client:
        assert client.is_server_live()
    scores = predict(f"unix:{gateway.inside}", MODEL, bundles.rows(3), SCHEMA, "grpc")["score"]
    assert len(scores) == 3, "the owner's own endpoint asks for nothing"
    assert gateway.inside.stat().st_mode & 0o077 == 0

    endpoint.keys.revoke("ours")
    gateway.keys.follow()
    wait_for("the revocation", lambda: endpoint.ask(key=ours) == (401, {"error": unknown}), host)
    assert endpoint.call(ours) == f"UNAUTHENTICATED: {unknown}"
    assert endpoint.ask(key=everything)[0] == 200
    assert host.pid(PROCESS_NAME) == pid, "all this without a restart"


def test_neither_the_key_nor_what_the_gateway_knows_of_it_reaches_a_server(endpoint: GuardedGateway) -> None:
    ears = Release(model="ears", version=1)
    with hearing() as (place, heard):
        places = {**endpoint.stack.endpoints(), ears.name: place}
        key = endpoint.make_key("for-ears", models=["ears"])
        routes = [
            ModelRoute(model=MODEL, epoch=900, stable=endpoint.stack.stable),
            ModelRoute(model="ears", epoch=900, stable=ears),
        ]
        endpoint.stack.gateway.apply(routes, places)
        try:
            wait_for(
                "the key", lambda: endpoint.ask("/v2/models/ears/infer", key)[0] == 200, endpoint.stack.host
            )
            assert endpoint.call(key, model="ears") == "OK"
            endpoint.keys.require(False)
            endpoint.stack.gateway.keys.follow()
            wait_for(
                "no question", lambda: endpoint.ask("/v2/models/ears/infer")[0] == 200, endpoint.stack.host
            )
            assert endpoint.ask("/v2/models/ears/infer", key)[0] == 200
            assert endpoint.call(key, model="ears") == "OK"
        finally:
            endpoint.keys.require(True)
            endpoint.stack.gateway.keys.follow()
            endpoint.stack.route(0)
    assert len(heard) >= 5
    for headers in heard:
        assert "authorization" not in headers
        assert "x-serin-may" not in headers
        assert key not in str(headers)


def test_no_key_and_no_private_key_stands_in_a_log_a_dump_or_another_file(endpoint: GuardedGateway) -> None:
    stack = endpoint.stack
    epoch = stack.route(0)
    assert endpoint.ask(key=endpoint.made[0])[0] == 200
    stack.logged(epoch, 1)
    seen = {"the config dump": stack.gateway.admin._ask("GET", "/config_dump")[1]}
    private = b"".join(endpoint.files.key.read_bytes().splitlines()[1:-1]).decode()
    for path in stack.folder.rglob("*"):
        if path.is_file() and path.stat().st_size < 50_000_000:
            seen[str(path.relative_to(stack.folder))] = path.read_text(errors="replace")
    assert "gateway/envoy.log" in seen
    assert "gateway/requests.jsonl" in seen
    assert len(endpoint.made) == 5
    for place, text in seen.items():
        assert not [key for key in endpoint.made if key in text], place
        assert private not in text, place
    for name in ("keys.json", "gateway/keys/keys.json", "gateway/tls/tls.json", "gateway/bootstrap.json"):
        assert (stack.folder / name).stat().st_mode & 0o077 == 0, name
