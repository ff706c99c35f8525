from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serin.errors import ReleaseNotReady
from serin.serving.envoy.routes import Timeouts
from serin.serving.external import External, parse_address
from serin.stack.controller import timeouts_of
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store
from tests.fakes.kserve import MODEL, serving
from tests.unit.serving import bundles


def place(address: str) -> Endpoint:
    return Endpoint(http=address, grpc=address, elsewhere=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://models.example:8000", place("models.example:8000")),
        ("127.0.0.1:80", place("127.0.0.1:80")),
        ("http://a:80/,grpc://b:81", Endpoint(http="a:80", grpc="b:81", elsewhere=True)),
        ("http://[fd00::7]:8000", place("[fd00::7]:8000")),
    ],
)
def test_an_address_is_read(text: str, expected: Endpoint) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "host", "http://host", "host:0", "host:99999", "http://host:80/v2", ":80"]
)
def test_an_invalid_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        parse_address(text)


def test_a_server_behind_tls_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="without TLS"):
        parse_address("https://models.example:443")


def test_an_address_keeps_its_version_and_a_new_one_gets_the_next(tmp_path: Path) -> None:
    external = External(tmp_path)
    versions = [external.register(MODEL, place(f"a:{port}")).version for port in (1, 2, 1, 3)]
    assert versions == [1, 2, 1, 3]
    assert External(tmp_path).versions(MODEL) == [1, 2, 3]
    assert External(tmp_path).endpoint(Release(model=MODEL, version=2)) == place("a:2")


def test_requests_to_servers_elsewhere_have_the_time_that_was_set_last(tmp_path: Path) -> None:
    external, store = External(tmp_path), Store(str(tmp_path / "store"))
    find = timeouts_of(store, external)
    release = external.register(MODEL, place("a:1"))
    assert find(release) == Timeouts(request_s=5.0)
    external.set_request_timeout(MODEL, 30.0)
    other = external.register(MODEL, place("a:2"))
    assert find(release) == find(other) == Timeouts(request_s=30.0)
    ours = bundles.publish(store, bias=0.0, spec="serving: {request_timeout: 2m, max_string_bytes: 9}\n")
    assert find(Release(model=ours.model, version=1)) == Timeouts(
        request_s=120.0, promised_p99_s=0.05, max_text_bytes=9
    )


def test_a_model_that_nobody_registered_is_not_external(tmp_path: Path) -> None:
    assert not External(tmp_path).has(Release(model=MODEL, version=1))


def test_a_server_is_ready_when_it_reports_ready(tmp_path: Path) -> None:
    external = External(tmp_path)
    with serving() as server:
        release = external.register(MODEL, place(server.address))
        assert external.state(release) == "ready"
        server.ready = False
        assert external.state(release) == "starting"
    assert external.state(release) == "starting"


@pytest.mark.parametrize(
    ("how", "seen"), [({"datatype": "INT64"}, "'x' INT64"), ({"columns": 2}, r"\[-1, 2\]")]
)
def test_a_server_with_other_tensors_does_not_fit(tmp_path: Path, how: dict[str, Any], seen: str) -> None:
    external = External(tmp_path)
    with serving() as one, serving() as same, serving(columns=-1) as vague, serving(**how) as other:
        wrong, live, *alike = (
            external.register(MODEL, place(server.address)) for server in (other, one, same, vague)
        )
        for release in alike:
            external.check_fits(release, live)
        with pytest.raises(ReleaseNotReady, match=f"{seen}.* differ from those of sentiment-v2"):
            external.check_fits(wrong, live)


def test_a_server_that_describes_nothing_does_not_fit(tmp_path: Path) -> None:
    external = External(tmp_path)
    with serving() as server:
        server.ready = False
        with pytest.raises(ReleaseNotReady, match="does not describe"):
            external.verify(external.register(MODEL, place(server.address)))
