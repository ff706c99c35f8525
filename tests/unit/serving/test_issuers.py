import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serin.errors import IssuerRefused, IssuerUnusable
from serin.serving.envoy.issuers import Issuer, lua_issuers, provider
from serin.serving.envoy.jwks import JwksFolder
from serin.serving.envoy.keys import KeyFile
from tests.kit.commands import serin_main as serin
from tests.kit.web import Handler, WebServer, in_a_thread

RSA = {"kty": "RSA", "kid": "a", "n": "AQAB", "e": "AQAB"}
URL = "https://login.example.com"


def issuer(**fields: Any) -> Issuer:
    return Issuer.model_validate({"name": "corp", "url": URL, "audiences": ["serin"], "added": 1.0, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": 'x"]'}, "name"),
        ({"url": "http://login.example.com"}, "is not an https URL"),
        ({"url": "file:///etc/passwd"}, "is not an https URL"),
        ({"url": "https://me:secret@login.example.com"}, "a URL must not hold a password"),
        ({"jwks_url": "http://10.0.0.1/keys"}, "is not an https URL"),
        ({"audiences": []}, "audiences"),
        (
            {"models": ["a"], "models_claim": "models"},
            "name the models or the claim that names them, not both",
        ),
        ({"jwks_url": f"{URL}/k", "jwks_file": "/k"}, "not both"),
        ({"models_claim": 'x"'}, "models_claim"),
        ({"models": ["../x"]}, "models"),
        ({"rate": "fast"}, "is not a valid rate"),
    ],
)
def test_an_issuer_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        issuer(**fields)


def test_an_issuer_is_verified_by_its_exact_name_audience_and_end() -> None:
    found = provider(issuer(), "{}")
    assert (found["issuer"], found["audiences"], found["require_expiration"]) == (URL, ["serin"], True)
    assert {place["name"] for place in found["from_headers"]} == {"authorization"}
    assert "from_params" not in found
    table = lua_issuers(
        (issuer(models=["a", "b"], rate="30/m"), issuer(name="x", models_claim="https://x/y"))
    )
    assert '["corp"] = {models = ",a,b,", wait = "2"}' in table
    assert '["x"] = {claim = "https://x/y"}' in table


def test_removing_the_last_issuer_does_not_open_the_gateway(tmp_path: Path) -> None:
    keys = KeyFile(path=tmp_path / "keys.json")
    keys.add_issuer(issuer())
    assert keys.read().required
    with pytest.raises(IssuerRefused, match="there is one of this name"):
        keys.add_issuer(issuer(url=f"{URL}/other"))
    with pytest.raises(IssuerRefused, match="has been added under another name"):
        keys.add_issuer(issuer(name="again"))
    assert keys.remove_issuer("corp").url == URL
    assert (keys.read().required, keys.read().issuers) == (True, ())
    with pytest.raises(IssuerRefused, match="there is no such issuer"):
        keys.remove_issuer("corp")


class Server:
    """Answers what the test says, by path."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes, dict[str, str]]] = {}
        server = self

        class Answering(Handler):
            def do_GET(self) -> None:
                status, body, headers = server.answers.get(self.path, (404, b"", {}))
                self.answer(body, status, **headers)

        self.http = WebServer(Answering)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def say(self, path: str, document: object, status: int = 200, **headers: str) -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.answers[path] = (status, body, headers)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with in_a_thread(made.http):
        yield made


def test_keys_are_found_by_discovery_and_only_public_ones_for_signatures_are_kept(
    server: Server, tmp_path: Path
) -> None:
    corp, folder = issuer(url=server.url), JwksFolder(tmp_path / "issuers")
    assert folder.known(corp) is None
    server.say("/.well-known/openid-configuration", {"issuer": server.url, "jwks_uri": f"{server.url}/keys"})
    keys = [
        {**RSA, "x5c": ["..."], "use": "sig"},
        {**RSA, "use": "enc"},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "b"},
        {"kty": "EC", "crv": "secp256k1", "x": "a", "y": "b"},
        {"kty": "OKP", "crv": "Ed25519", "x": "a"},
        "x",
    ]
    server.say("/keys", {"keys": keys})
    found = folder.fetch(corp)
    assert json.loads(found.jwks) == {
        "keys": [{**RSA, "use": "sig"}, {"kty": "OKP", "crv": "Ed25519", "x": "a"}]
    }
    (kept,) = folder.folder.iterdir()
    assert (kept.stat().st_mode & 0o777, folder.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    server.answers.clear()
    with pytest.raises(IssuerUnusable, match="answers 404"):
        folder.fetch(corp)
    assert JwksFolder(folder.folder).known(corp) == found, "also for the next process"
    assert folder.known(issuer(url=server.url, jwks_url=f"{server.url}/others")) is None
    kept.write_text("{")
    assert folder.known(corp) is None, "a damaged file lets nobody in"
    folder.forget(corp)
    assert not kept.exists()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b"<html>", "its answer is not JSON"),
        ([], "its answer is not a JSON object"),
        ({"keys": {}}, "is not a JSON Web Key Set"),
        ({"keys": []}, "holds no public key for signatures"),
        ({"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}, "holds no public key for signatures"),
        ({"keys": [{**RSA, "d": "c2VjcmV0"}]}, "holds a private key; publish the public ones"),
        (b"x" * (1 << 20) + b"x", "sends more than 1048576 bytes"),
    ],
)
def test_a_key_set_that_cannot_be_used_is_refused(
    server: Server, tmp_path: Path, document: object, words: str
) -> None:
    server.say("/keys", document)
    with pytest.raises(IssuerUnusable, match=words):
        JwksFolder(tmp_path).fetch(issuer(jwks_url=f"{server.url}/keys"))
    assert list(tmp_path.iterdir()) == []


def test_a_provider_cannot_send_the_reader_elsewhere(server: Server, tmp_path: Path) -> None:
    place, folder = "/.well-known/openid-configuration", JwksFolder(tmp_path)
    for answer, words in (
        ({"issuer": f"{server.url}/other", "jwks_uri": f"{server.url}/keys"}, "write the issuer exactly so"),
        ({"issuer": server.url, "jwks_uri": "file:///etc/passwd"}, "is not an https URL"),
        ({"issuer": server.url}, "is not an https URL"),
    ):
        server.say(place, answer)
        with pytest.raises(IssuerUnusable, match=words):
            folder.fetch(issuer(url=server.url))
    for target in ("file:///etc/passwd", "http://192.0.2.1/keys"):
        server.say("/keys", {}, status=302, location=target)
        with pytest.raises(IssuerUnusable, match=r"answers 302|is not an https URL"):
            folder.fetch(issuer(jwks_url=f"{server.url}/keys"))


def test_a_file_of_keys_is_read_and_followed(tmp_path: Path) -> None:
    file, folder = tmp_path / "jwks.json", JwksFolder(tmp_path / "issuers")
    corp = issuer(jwks_file=str(file))
    with pytest.raises(IssuerUnusable, match="No such file"):
        folder.fetch(corp)
    file.write_text(json.dumps({"keys": [RSA]}))
    before = folder.signature([corp])
    assert folder.fetch(corp).count == 1
    file.write_text(json.dumps({"keys": [RSA, {**RSA, "kid": "b"}]}))
    assert folder.signature([corp]) != before
    known = folder.known(corp)
    assert known.count == 2
    folder.forget(corp)
    assert file.exists(), "it is the user's"


def test_issuers_are_added_listed_and_removed_from_the_command_line(
    home: Path, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    server.say("/keys", {"keys": [RSA]})
    adding = ("keys", "issuer", "add", "corp", "--url", URL, "--audience", "serin")
    assert serin(*adding, "--jwks-url", f"{server.url}/none") == 1
    assert "answers 404" in capsys.readouterr().err
    assert not (home / "keys.json").exists(), "nothing has changed"
    assert serin(*adding, "--jwks-url", "http://example.com/keys") == 2
    assert "is not an https URL" in capsys.readouterr().err
    good = (*adding, "--jwks-url", f"{server.url}/keys", "--models-claim", "models", "--rate", "20/s")
    assert serin(*good) == 0
    assert "it has 1 public key\n" in capsys.readouterr().out
    assert serin("keys", "issuer", "list", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["public_keys"], listed["models_claim"]) == ("corp", 1, "models")
    assert serin("keys", "issuer", "list") == 0
    assert "20/s" in capsys.readouterr().out
    assert serin("keys", "issuer", "remove", "corp") == 0
    assert list((home / "issuers").iterdir()) == []
    assert serin("keys", "issuer", "remove", "corp") == 2
