"""Tokens of a real OpenID provider at a real gateway: discovery, client credentials, rotation, an outage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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
from serin.serving.envoy.gateway import PROCESS_NAME
from tests.cluster.part import need
from tests.cluster.parts.openid import PROGRAM
from tests.e2e.serving_host import wait_for
from tests.e2e.token_scene import OTHER, token_scene
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
            end = time.monotonic() + _READY_S
            while not self._answers():
                said = self._log.read_text(errors="replace")[-2000:]
                assert server.poll() is None, f"the provider exited: {said}"
                assert time.monotonic() < end, f"the provider is not ready: {said}"
                time.sleep(0.05)
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


def serin(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serin.cli", *arguments],
        env={**os.environ, "SERIN_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_tokens_of_a_real_provider_open_their_models_through_rotation_and_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("openid")
    monkeypatch.setattr(jwks, "REFRESH_S", 0.2)
    provider = Provider(tmp_path / "provider.log")
    with token_scene() as scene:

        def becomes(token: str, status: int) -> None:
            def happened() -> bool:
                scene.gateway.follow_keys()  # as the controller does every half second
                return all(scene.ask(token)[0] == status for _ in range(3))

            wait_for(f"{status}", happened, scene.host, PROCESS_NAME, within_s=30.0)

        adding = ("keys", "issuer", "add", "idp", "--url", provider.url, "--audience", "serin")
        refused = serin(scene.home, *adding)
        assert refused.returncode == 1, "the provider is not up yet"
        assert "cannot be read" in refused.stderr
        with provider.running():
            added = serin(scene.home, *adding, "--models-claim", "scope")
            assert added.returncode == 0, added.stderr
            assert "it has 1 public key" in added.stdout
            first = provider.token(f"{MODEL} x")
            becomes(first, 200)
            assert scene.statuses(first) == (200, "OK")
            assert scene.statuses(first, model=OTHER) == (403, "PERMISSION_DENIED")
            assert scene.statuses(provider.token(MODEL, audience="else")) == (401, "UNAUTHENTICATED")
            assert scene.statuses(None) == (401, "UNAUTHENTICATED")
        scene.gateway.follow_keys()
        assert scene.statuses(first) == (200, "OK"), "the provider is down, and its keys are known"
        listed = serin(scene.home, "keys", "issuer", "list")
        assert "idp" in listed.stdout
        with provider.running():
            second = provider.token(MODEL)
            becomes(second, 200)
            assert scene.statuses(first) == (401, "UNAUTHENTICATED"), "its key was withdrawn"
            assert scene.statuses(second) == (200, "OK")
        removed = serin(scene.home, "keys", "issuer", "remove", "idp")
        assert removed.returncode == 0, removed.stderr
        becomes(second, 401)
