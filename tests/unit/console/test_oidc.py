"""Login with a real OpenID Connect provider, which a test can make lie."""

import base64
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt
import oidc_provider_mock
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from serin.console import oidc
from serin.host.console import ConsoleSettings, OidcSettings
from serin.spec.roles import Grant
from tests.unit.console.conftest import Visitor, visitor

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the provider
URL = "http://127.0.0.1:8090"


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    """A provider that knows Ada, who administers, Vic, who reads, and Eve, who has no role."""
    with oidc_provider_mock.run_server_in_thread() as server:
        address = f"http://localhost:{server.server_port}"
        for name, groups in (("ada", ["ml-platform", "all"]), ("vic", ["support"]), ("eve", ["all"])):
            claims = {"email": f"{name}@example.com", "groups": groups}
            httpx.put(f"{address}/users/{name}", json=claims).raise_for_status()
        SECRET.write_text("known to both\n")
        yield address
    SECRET.unlink()


SECRET = Path(tempfile.gettempdir()) / f"serin-oidc-{os.getpid()}"


def provider(issuer: str) -> OidcSettings:
    groups = {
        "ml-platform": (Grant(models="*", role="administer"),),
        "support": (Grant(models="*", role="view"),),
    }
    return OidcSettings(issuer=issuer, client_id="serin", client_secret_file=SECRET, groups=groups)


def settings(issuer: str) -> ConsoleSettings:
    return ConsoleSettings(url=URL, oidc=provider(issuer))


def go_to_provider(somebody: Visitor) -> str:
    answer = somebody.get("/login/oidc?next=/runs")
    assert answer.status_code == 303
    return answer.headers["location"]


def agree(url: str, name: str) -> str:
    """What a person does at the provider; returns where the provider leads the browser."""
    with httpx.Client(follow_redirects=False) as browser:
        answer = browser.post(url, data={"sub": name})
    assert answer.status_code in (302, 303), answer.text[:500]
    return answer.headers["location"]


def come_back(somebody: Visitor, url: str) -> httpx.Response:
    place = urlsplit(url)
    return somebody.get(f"{place.path}?{place.query}")


@pytest.mark.parametrize(("name", "group"), [("ada", "ml-platform"), ("vic", "support")])
def test_a_person_is_named_with_the_groups_that_have_a_role(
    home: Path, issuer: str, name: str, group: str
) -> None:
    somebody = visitor(home, settings(issuer))
    asked = parse_qs(urlsplit(went := go_to_provider(somebody)).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert asked["redirect_uri"] == [f"{URL}/login/oidc/done"]
    done = come_back(somebody, agree(went, name))
    assert done.status_code == 200, done.text
    assert "url=/runs" in done.text
    page = somebody.get("/runs")
    assert page.status_code == 200
    assert f"{name}@example.com ({group})" in page.text


def test_a_person_without_a_role_is_refused_by_name(home: Path, issuer: str) -> None:
    somebody = visitor(home, settings(issuer))
    done = come_back(somebody, agree(go_to_provider(somebody), "eve"))
    assert done.status_code == 403
    assert "eve@example.com is known to the provider, but has no role here" in done.text
    assert somebody.get("/runs").status_code == 303


def test_a_login_that_another_browser_began_is_refused(home: Path, issuer: str) -> None:
    attacker, victim = visitor(home, settings(issuer)), visitor(home, settings(issuer))
    answer = agree(go_to_provider(attacker), "ada")
    assert come_back(victim, answer).status_code == 400
    go_to_provider(victim)
    assert come_back(victim, answer).status_code == 400
    assert victim.get("/runs").status_code == 303


def test_the_code_is_exchanged_with_the_verifier_of_the_challenge(
    issuer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider of these tests does not compare the two."""
    wanted = provider(issuer)
    begun = oidc.begin(wanted, f"{URL}/login/oidc/done")
    sent = parse_qs(urlsplit(agree(begun.url, "ada")).query)
    assert sent["state"] == [begun.state]
    posted: dict[str, str] = {}
    real = oidc._ask

    def ask(method: str, url: str, **more: Any) -> dict[str, Any]:
        posted.update(more.get("data") or {})
        return real(method, url, **more)

    monkeypatch.setattr(oidc, "_ask", ask)
    person = oidc.finish(wanted, begun, sent["code"][0], f"{URL}/login/oidc/done")
    assert (person.subject, person.groups) == ("ada", ("ml-platform",))
    digest = hashlib.sha256(posted["code_verifier"].encode()).digest()
    challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    assert parse_qs(urlsplit(begun.url).query)["code_challenge"] == [challenge]
    with pytest.raises(oidc.LoginRefused, match="answered 400"):  # a code works once
        oidc.finish(wanted, begun, sent["code"][0], f"{URL}/login/oidc/done")


def test_an_answer_that_belongs_to_another_login_is_refused(issuer: str) -> None:
    wanted = provider(issuer)
    begun = oidc.begin(wanted, f"{URL}/login/oidc/done")
    code = parse_qs(urlsplit(agree(begun.url, "ada")).query)["code"][0]
    other = oidc.Begun(url="", state=begun.state, nonce="another", verifier=begun.verifier)
    with pytest.raises(oidc.LoginRefused, match="belongs to another login"):
        oidc.finish(wanted, other, code, f"{URL}/login/oidc/done")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"aud": "somebody-else"}, "Audience"),
        ({"iss": "https://evil.example"}, "[Ii]ssuer"),
        ({"exp": 1}, "expired"),
        ({"azp": "somebody-else"}, "another client"),
        ({}, "cannot be trusted|does not publish"),
    ],
)
def test_a_token_that_says_something_else_is_refused(
    issuer: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], reason: str
) -> None:
    """Signed by a key that the provider publishes, except in the last case."""
    wanted = provider(issuer)
    key, stranger = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))
    published = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": "one"}
    now = int(time.time())
    claims = {
        "iss": issuer,
        "aud": "serin",
        "sub": "ada",
        "iat": now,
        "exp": now + 60,
        "nonce": "n",
        **change,
    }
    token = jwt.encode(claims, key if change else stranger, algorithm="RS256", headers={"kid": "one"})
    real = oidc._ask

    def ask(method: str, url: str, **more: object) -> dict[str, object]:
        if url.endswith("openid-configuration"):
            return real(method, url)
        return {"id_token": token} if method == "POST" else {"keys": [published]}

    monkeypatch.setattr(oidc, "_ask", ask)
    begun = oidc.Begun(url="", state="s", nonce="n", verifier="v")
    with pytest.raises(oidc.LoginRefused, match=reason):
        oidc.finish(wanted, begun, "code", f"{URL}/login/oidc/done")


def test_a_token_signed_with_the_client_s_own_secret_or_not_at_all_is_refused(
    issuer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = provider(issuer)
    now = int(time.time())
    claims = {"iss": issuer, "aud": "serin", "sub": "ada", "iat": now, "exp": now + 60, "nonce": "n"}
    real = oidc._ask
    for token in (
        jwt.encode(claims, None, algorithm="none"),
        jwt.encode(claims, "s" * 32, algorithm="HS256"),
    ):
        monkeypatch.setattr(
            oidc, "_ask", lambda m, u, token=token, **_: {"id_token": token} if m == "POST" else real(m, u)
        )
        with pytest.raises(oidc.LoginRefused, match=r"cannot be trusted|does not publish"):
            oidc.finish(wanted, oidc.Begun(url="", state="", nonce="n", verifier=""), "c", URL)


def test_a_provider_that_does_not_answer_is_reported_and_secrets_still_work(home: Path) -> None:
    made = settings("http://localhost:9")
    somebody = visitor(home, made)
    answer = somebody.get("/login/oidc")
    assert answer.status_code == 502
    assert "the provider cannot be asked" in answer.text
    assert somebody.login("viewer").get("/runs").status_code == 200


def test_where_only_the_provider_decides_secrets_are_refused(home: Path, issuer: str) -> None:
    from serin.host.console import account_secret

    somebody = visitor(home, settings(issuer).model_copy(update={"secrets": False}))
    assert "Secret" not in somebody.get("/login").text
    assert somebody.post("/login", {"secret": account_secret(home, "operator")}).status_code == 401
