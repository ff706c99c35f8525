"""Tokens of a real OpenID provider at a real gateway: discovery, client credentials, rotation, an outage."""

import json
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serin.machine.ports import free_ports
from serin.serving.envoy import jwks
from tests.cluster.part import need
from tests.cluster.parts.openid import PROGRAM
from tests.e2e.serving_host import wait_for
from tests.e2e.token_scene import OTHER, token_scene
from tests.kit.commands import serin_process
from tests.kit.waiting import running, tail, until
from tests.unit.serving.bundles import MODEL

_READY_S = 30.0


class Provider:
    """oauth2-mock-server on loopback. Each start makes a new key."""

    def __init__(self, log: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://localhost:{self.port}"
        self._log = log

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._log.open("ab") as log:
            server = subprocess.Popen(
                [PROGRAM, "-a", "127.0.0.1", "-p", str(self.port)], stdout=log, stderr=subprocess.STDOUT
            )
        try:
            until(
                self._answers, "the provider", within_s=_READY_S, alive=running(server), said=tail(self._log)
            )
            yield
        finally:
            server.kill()
            server.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.get("/.well-known/openid-configuration")["issuer"] == self.url)
        except (OSError, urllib.error.URLError):
            return False

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.load(answer)

    def token(self, scope: str, audience: str = "serin") -> str:
        """By client credentials; the scope names models."""
        fields = {"grant_type": "client_credentials", "scope": scope, "aud": audience}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/token", data=urllib.parse.urlencode(fields).encode()
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["access_token"])


def test_tokens_of_a_real_provider_open_their_models_through_rotation_and_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("openid")
    monkeypatch.setattr(jwks, "REFRESH_S", 0.2)
    provider = Provider(tmp_path / "provider.log")
    with token_scene() as scene:

        def becomes(token: str, status: int) -> None:
            def happened() -> bool:
                scene.gateway.keys.follow()  # as the controller does every half second
                return all(scene.ask(token)[0] == status for _ in range(3))

            wait_for(f"{status}", happened, scene.host, within_s=30.0)

        variables = {**os.environ, "SERIN_HOME": str(scene.home)}
        adding = ("keys", "issuer", "add", "idp", "--url", provider.url, "--audience", "serin")
        refused = serin_process(*adding, env=variables, code=1)  # the provider is not up yet
        assert "cannot be read" in refused.stderr
        with provider.running():
            added = serin_process(*adding, "--models-claim", "scope", env=variables)
            assert "it has 1 public key" in added.stdout
            first = provider.token(f"{MODEL} x")
            becomes(first, 200)
            assert scene.statuses(first) == (200, "OK")
            assert scene.statuses(first, model=OTHER) == (403, "PERMISSION_DENIED")
            assert scene.statuses(provider.token(MODEL, audience="else")) == (401, "UNAUTHENTICATED")
            assert scene.statuses(None) == (401, "UNAUTHENTICATED")
        scene.gateway.keys.follow()
        assert scene.statuses(first) == (200, "OK"), "the provider is down, and its keys are known"
        listed = serin_process("keys", "issuer", "list", env=variables)
        assert "idp" in listed.stdout
        with provider.running():
            second = provider.token(MODEL)
            becomes(second, 200)
            assert scene.statuses(first) == (401, "UNAUTHENTICATED"), "its key was withdrawn"
            assert scene.statuses(second) == (200, "OK")
        serin_process("keys", "issuer", "remove", "idp", env=variables)
        becomes(second, 401)
