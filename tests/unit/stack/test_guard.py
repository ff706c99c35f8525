from __future__ import annotations

import json
from pathlib import Path

from serin.serving.envoy.issuers import Issuer
from serin.serving.envoy.tls import TlsFiles
from serin.stack.guard import Guard, read_guard
from serin.stack.wiring import build_gateway, key_file
from tests.e2e.serving_certificates import Authority


def test_a_gateway_without_a_guard_reports_it(tmp_path: Path) -> None:
    assert read_guard(tmp_path).words == "no TLS; no API keys: anyone who can reach this port gets answers"


def test_keys_are_counted_and_a_broken_file_is_said_aloud(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    for name in ("ada", "bob", "eve"):
        keys.create(name, lasts_s=1e-9 if name == "eve" else None)
    keys.revoke("bob")
    assert read_guard(tmp_path).words == "no TLS; API keys required (1 valid)"
    issuer = Issuer(name="corp", url="https://login.example.com", audiences=("serin",), added=1.0)
    keys.add_issuer(issuer)
    assert read_guard(tmp_path).words == "no TLS; API keys required (1 valid, 1 issuer of tokens)"
    keys.path.write_text("{")
    assert read_guard(tmp_path).words.startswith("no TLS; NOT OPEN: the gateway is closed: ")


def test_tls_is_known_from_the_bootstrap_also_while_no_gateway_runs(tmp_path: Path) -> None:
    files = TlsFiles(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    Authority().pair().write(files.certificate, files.key)
    gateway = build_gateway(tmp_path / "home")
    gateway.write_bootstrap(1, tls=files, request_filter=tmp_path / "filter.so")
    found = read_guard(tmp_path / "home")
    assert found == Guard(tls=True, certificate_days=None, keys_required=False, good_keys=0)
    gateway.write_bootstrap(1, request_filter=tmp_path / "filter.so")
    assert not read_guard(tmp_path / "home").tls
    assert not (tmp_path / "home" / "gateway" / "tls" / "tls.json").exists(), "no copy of a key is left"


def test_a_gateway_without_its_filter_listens_on_loopback_only_and_reports_it(tmp_path: Path) -> None:
    gateway, library = build_gateway(tmp_path), tmp_path / "filter.so"
    for request_filter, address in ((library, "0.0.0.0"), (None, "127.0.0.1")):
        gateway.write_bootstrap(1, "0.0.0.0", request_filter=request_filter)
        listener = tmp_path / "gateway" / "listener" / "listener.json"
        (public,) = json.loads(listener.read_text())["resources"]
        assert public["address"]["socket_address"]["address"] == address
        assert ("no request filter" in read_guard(tmp_path).words) == (request_filter is None)
