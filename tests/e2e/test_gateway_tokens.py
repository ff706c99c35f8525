"""Tokens of an OpenID provider and rate limits at a real Envoy, by HTTP and gRPC."""

import base64
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from serin.serving.envoy import jwks
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.envoy.issuers import Issuer
from serin.serving.envoy.routes import Timeouts
from tests.e2e.serving_host import wait_for
from tests.e2e.token_scene import AUDIENCE, OTHER, Scene, public_jwk, sign, token_scene
from tests.unit.serving.bundles import MODEL

OK, NOBODY, FOREIGN, TOO_MANY = (
    (200, "OK"),
    (401, "UNAUTHENTICATED"),
    (403, "PERMISSION_DENIED"),
    (429, "RESOURCE_EXHAUSTED"),
)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with token_scene() as opened:
        yield opened


def take(scene: Scene, name: str = "corp", **settings: Any) -> Issuer:
    """As `serin keys issuer add` does, instead of an issuer that was there before."""
    for issuer in scene.keys.read().issuers:
        scene.keys.remove_issuer(issuer.name)
    fields = {"name": name, "url": scene.provider.url, "audiences": (AUDIENCE,), "added": time.time()}
    issuer = Issuer.model_validate({**fields, **settings})
    scene.gateway.keys.jwks.fetch(issuer)
    scene.keys.add_issuer(issuer)
    scene.gateway.keys.follow()
    return issuer


def everywhere(scene: Scene, secret: str | None, expected: tuple[int, str], **where: str) -> None:
    """Waits until all of Envoy's threads answer so: they take new settings a moment later than it says."""
    wait_for(
        f"{expected}",
        lambda: all(scene.statuses(secret, **where) == expected for _ in range(3)),
        scene.host,
        within_s=20.0,
    )


def test_a_key_or_a_token_opens_the_gateway_and_neither_does_not(scene: Scene) -> None:
    assert scene.statuses(None) == OK, "nothing is required yet"
    pid = scene.host.pid(PROCESS_NAME)
    take(scene, models_claim="models")
    everywhere(scene, None, NOBODY)
    _, key = scene.keys.create("ada")
    scene.gateway.keys.follow()
    everywhere(scene, key, OK)
    for models in (["x", MODEL], f"x {MODEL}", f"x,{MODEL}", "*", ["*"]):
        token = scene.provider.token(models=models)
        assert scene.statuses(token) == OK, models
    for models in (None, [], [OTHER], OTHER, {"a": MODEL}, [1], MODEL[:-1], f"{MODEL}x", True):
        token = scene.provider.token(models=models)
        assert scene.statuses(token) == FOREIGN, models
    assert scene.statuses(scene.provider.token(models=[OTHER]), model=OTHER) == OK

    take(scene, models=(OTHER,))
    everywhere(scene, scene.provider.token(), FOREIGN)
    assert scene.statuses(scene.provider.token(), model=OTHER) == OK
    take(scene)
    everywhere(scene, scene.provider.token(), OK)
    for name in (issuer.name for issuer in scene.keys.read().issuers):
        scene.keys.remove_issuer(name)
    scene.gateway.keys.follow()
    everywhere(scene, scene.provider.token(), NOBODY)
    assert scene.statuses(key) == OK
    assert scene.host.pid(PROCESS_NAME) == pid, "all this without a restart"


def unsigned(claims: dict[str, Any], **header: str) -> str:
    parts = [json.dumps({"typ": "JWT", **header}), json.dumps(claims)]
    return ".".join([base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts] + [""])


def test_no_token_that_is_wrong_in_any_way_is_taken(scene: Scene) -> None:
    take(scene)
    provider, now = scene.provider, int(time.time())
    good = provider.token()
    everywhere(scene, good, OK)
    ((name, key),) = provider.keys.items()
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    head, body, signature = good.split(".")
    other_claims = base64.urlsafe_b64encode(json.dumps(provider.claims("eve")).encode()).decode().rstrip("=")
    symmetric = jwt.PyJWS().encode(
        json.dumps(provider.claims("eve")).encode(),
        base64.b64encode(public),
        "HS256",
        headers={"kid": name},
    )
    wrong = {
        "alg none": unsigned(provider.claims("eve"), alg="none"),
        "alg None": unsigned(provider.claims("eve"), alg="None", kid=name),
        "no signature": f"{head}.{body}.",
        "another signature": f"{head}.{body}.{signature[:-4]}AAAA",
        "other claims": f"{head}.{other_claims}.{signature}",
        "a stranger's key": sign(stranger, name, provider.claims("eve")),
        "a stranger's key by its name": sign(stranger, "stranger", provider.claims("eve")),
        "the public key as a secret": symmetric,
        "its own key": jwt.encode(
            provider.claims("eve"), stranger, "RS256", headers={"jwk": public_jwk(stranger, name)}
        ),
        "expired": provider.token(exp=now - 120),
        "without an end": provider.token(exp=None),
        "not yet valid": provider.token(nbf=now + 120),
        "another audience": provider.token(aud="others"),
        "no audience": provider.token(aud=None),
        "another issuer": provider.token(iss="https://other.example.com"),
        "an issuer that begins alike": provider.token(iss=f"{provider.url}/"),
        "no issuer": provider.token(iss=None),
        "two parts": f"{head}.{body}",
        "four parts": f"{good}.{signature}",
        "not base64": f"{head}.{body}.!!!!",
        "empty parts": "..",
        "no JSON": "bm8.bm8.bm8",
        "large": provider.token(padding="x" * 5000),
    }
    for what, token in wrong.items():
        expected = OK if what == "large" else NOBODY
        assert scene.statuses(token) == expected, what
    assert scene.ask(provider.token(padding="x" * 9000))[0] == 431
    text = json.loads(scene.ask(wrong["expired"])[1])["error"]
    assert text == "this token is not valid: Jwt is expired"
    assert scene.call(wrong["another audience"]).startswith(
        "UNAUTHENTICATED: this token is not valid: Audiences"
    )

    _, ada = scene.keys.create("ada-2")
    scene.gateway.keys.follow()
    everywhere(scene, ada, OK)
    for pair in ((good, good), (good, ada), (ada, good), (ada, ada), (wrong["expired"], good), (good, "")):
        assert scene.ask(*pair)[0] == 401, "several authorization headers are none"
    path = f"/v2/models/{MODEL}/infer?access_token={good}"
    assert scene.ask(model=path.removeprefix("/v2/models/").replace("/infer?", "?"))[0] == 401


def test_the_provider_s_new_keys_are_followed_and_the_old_ones_kept_while_it_is_down(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jwks, "REFRESH_S", 0.0)
    caplog.set_level(logging.INFO)
    take(scene)
    provider, follow = scene.provider, scene.gateway.keys.follow
    old = provider.token()
    everywhere(scene, old, OK)
    provider.rotate("second")
    new = provider.token()

    def followed() -> bool:
        follow()  # as the controller does every half second
        return [scene.ask(each)[0] for each in (old, new, new, new)] == [401, 200, 200, 200]

    wait_for("the new key", followed, scene.host, within_s=20.0)

    monkeypatch.setattr(provider, "down", True)
    asked = provider.asked
    wait_for("questions", lambda: (follow(), provider.asked > asked + 3)[1], scene.host, within_s=20.0)
    assert scene.statuses(new) == OK
    failures = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    # It may be asked for its address and its keys, each of which fails once in the log.
    assert 1 <= len(failures) == len(set(failures)) <= 2, failures
    assert all("answers 503; the keys known so far stay in force" in each for each in failures)

    again = Gateway(  # another controller, and a gateway that starts while the provider is down
        scene.gateway.folder, admin=scene.home / "admin.sock", log=scene.gateway.log, keys=scene.keys.path
    )
    again.keys.place()
    again.keys.follow()
    assert scene.statuses(new) == OK


def test_the_caller_is_logged_and_the_token_is_nowhere(scene: Scene) -> None:
    take(scene)
    token = scene.provider.token('eve "\n' + "x" * 300)
    everywhere(scene, token, OK)
    scene.heard.clear()
    assert scene.statuses(token) == OK
    assert len(scene.heard) == 2
    for headers in scene.heard:
        assert "authorization" not in headers
        assert token.split(".")[1] not in str(headers)
        assert not [name for name in headers if "jwt" in name]

    def callers() -> set[str | None]:
        lines = scene.gateway.log.read_text().splitlines()
        return {json.loads(line)["caller"] for line in lines}

    mine = ('corp:eve "\n' + "x" * 300)[:128]
    wait_for("its lines", lambda: mine in callers(), scene.host, within_s=20.0)
    assert {"ada", "corp:alice", None} <= callers()
    for path in scene.home.rglob("*"):
        if path.is_file():
            assert token.split(".")[2] not in path.read_text(errors="replace"), path


def test_a_caller_or_a_model_above_its_rate_is_refused_and_others_are_not(scene: Scene) -> None:
    take(scene, rate="1/h", burst=3)
    _, slow = scene.keys.create("slow", rate="2/h")
    _, fast = scene.keys.create("fast")
    scene.gateway.keys.follow()
    everywhere(scene, fast, OK)
    before = scene.gateway.refused()
    seen = [scene.ask(slow) for _ in range(4)]
    assert [status for status, *_ in seen] == [200, 200, 429, 429]
    assert seen[-1][2]["retry-after"] == "1800"
    words = "too many requests for this caller or model; send fewer, or try again later"
    assert json.loads(seen[-1][1]) == {"error": words}
    assert scene.call(slow) == f"RESOURCE_EXHAUSTED: {words}"
    assert scene.ask(slow, model=OTHER)[0] == 429, "the limit is the key's"
    for subject in ("carol", "dave"):
        token = scene.provider.token(subject)
        statuses = [scene.ask(token)[0], scene.ask(token)[0], scene.call(token), *scene.statuses(token)]
        assert statuses == [200, 200, "OK", *TOO_MANY], "each subject has its own"
    assert scene.statuses(fast) == OK

    scene.route(**{OTHER: Timeouts(rate_limit="1/m", rate_burst=4)})
    everywhere(scene, fast, OK)
    seen = []
    wait_for(
        "the model's limit",
        lambda: (seen.append(scene.ask(fast, model=OTHER)), seen[-1][0] == 429)[1],
        scene.host,
        within_s=20.0,
    )
    assert seen[-1][2]["retry-after"] == "60"
    assert scene.statuses(fast, model=OTHER) == TOO_MANY
    assert scene.statuses(fast) == OK, "other models have no limit"
    scene.route()
    everywhere(scene, fast, OK, model=OTHER)

    after = scene.gateway.refused()
    counted = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in ("429", "gRPC 8")}
    assert counted["429"] >= 6
    assert counted["gRPC 8"] == 4
    for line in scene.gateway.log.read_text().splitlines():
        assert json.loads(line)["code"] != 429, "such a request is no evidence about a release"
