import hashlib
import json
import os
from pathlib import Path

import pytest

from serin.errors import EnvoyFileUnfit, KeyFileBroken, KeyRefused, TlsUnfit
from serin.serving.envoy.gateway import merge, read_expert
from serin.serving.envoy.keys import KeyFile, KeyRing, lua_table
from serin.serving.envoy.tls import TlsFiles, tls_pair
from tests.e2e.serving_certificates import Authority


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(path=tmp_path / "keys.json")


def test_without_a_file_no_key_is_asked_for(keys: KeyFile) -> None:
    assert keys.read() == KeyRing(required=False, keys=())


def test_a_key_is_kept_as_its_hash_in_a_file_that_only_its_owner_reads(keys: KeyFile) -> None:
    before = os.umask(0)
    try:
        entry, key = keys.create("ada", models=["delays", "delays", "churn"], lasts_s=60)
    finally:
        os.umask(before)
    assert keys.path.stat().st_mode & 0o777 == 0o600
    assert key not in keys.path.read_text()
    assert entry.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert len(key) == 49, "keys.lua hashes exactly one block"
    assert entry.models == ("delays", "churn")
    assert entry.expires == entry.made + 60
    assert (keys.read().required, keys.read().keys) == (True, (entry,))
    fields = f'name = "ada", till = {entry.expires:.0f}, models = ",delays,churn,"'
    assert f'["{entry.sha256}"] = {{{fields}}},' in lua_table(keys.read())


def test_a_key_is_good_until_it_expires_or_is_revoked(keys: KeyFile) -> None:
    entry, _ = keys.create("ada", lasts_s=60)
    assert [entry.state(entry.made + after) for after in (0, 59, 60)] == ["good", "good", "expired"]
    assert keys.revoke("ada").state(entry.made) == "revoked"
    assert keys.revoke("ada") == keys.read().keys[0], "the time of the first revocation stays"


def test_revoking_the_last_key_does_not_open_the_gateway(keys: KeyFile) -> None:
    keys.create("ada")
    keys.revoke("ada")
    assert keys.read().required
    assert lua_table(keys.read()) == "local KEYS = {\n}\nlocal ISSUERS = {\n}\n"
    keys.require(False)
    assert not keys.read().required


def test_every_change_has_its_own_signature(keys: KeyFile) -> None:
    found = {keys.signature()}
    for name in ("ada", "bob"):
        keys.create(name)
        found.add(keys.signature())
        keys.revoke(name)
        found.add(keys.signature())
    assert len(found) == 5


def test_what_cannot_be_is_refused_and_changes_nothing(keys: KeyFile) -> None:
    keys.create("ada")
    before = keys.path.read_text()
    keys_of = pytest.raises(KeyRefused, match="there is or was one of this name")
    with keys_of:
        keys.create("ada")
    with pytest.raises(KeyRefused, match="a name is made of"):
        keys.create('x"]=1')
    with pytest.raises(KeyRefused, match="a model's name is made of"):
        keys.create("bob", models=['delays"'])
    with pytest.raises(KeyRefused, match="there is no such key"):
        keys.revoke("bob")
    assert keys.path.read_text() == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": "other"}', '{"version": 2}', '{"keys": [{"name": "x"}]}', '{"unknown": 1}'],
)
def test_a_file_that_cannot_be_trusted_lets_nobody_in(keys: KeyFile, content: str) -> None:
    keys.path.write_text(content)
    with pytest.raises(KeyFileBroken, match="is not a file of API keys"):
        keys.read()


def test_a_name_that_would_end_its_quotes_is_refused_in_the_file_too(keys: KeyFile) -> None:
    entry, _ = keys.create("ada", models=["delays"])
    ring = json.loads(keys.path.read_text())
    ring["keys"][0]["models"] = ['x",}, os.exit()']
    keys.path.write_text(json.dumps(ring))
    with pytest.raises(KeyFileBroken, match=r"keys.0.models.0: String should match"):
        keys.read()
    assert entry.sha256 in keys.path.read_text()


# certificates


def test_a_certificate_is_read_with_the_key_that_belongs_to_it(tmp_path: Path) -> None:
    authority = Authority()
    files = TlsFiles(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with pytest.raises(TlsUnfit, match=r"cert\.pem: No such file"):
        files.read()
    pair, other = authority.pair(), authority.pair()
    pair.write(files.certificate, files.key)
    assert files.read() == (pair.certificate, pair.key)
    before = files.signature()
    files.key.write_bytes(other.key)
    assert files.signature() != before
    with pytest.raises(TlsUnfit, match="they do not belong together"):
        files.read()
    files.key.write_bytes(authority.pair(passphrase=b"x").key)
    with pytest.raises(TlsUnfit, match="has a passphrase"):
        files.read()


def test_two_options_name_a_pair_or_nothing() -> None:
    assert tls_pair(None, None) is None
    assert tls_pair(Path("/c"), Path("/k")) == TlsFiles(certificate=Path("/c"), key=Path("/k"))
    with pytest.raises(TlsUnfit, match="one of the two is not named"):
        tls_pair(Path("/c"), None)


# settings of one's own


def test_settings_are_added_and_ours_are_kept() -> None:
    ours = {"node": {"id": "gateway"}, "static_resources": {"clusters": [{"name": "health"}]}}
    theirs = {"static_resources": {"clusters": [{"name": "mine"}]}, "stats_flush_interval": "10s"}
    assert merge(ours, theirs, Path("f")) == {
        "node": {"id": "gateway"},
        "static_resources": {"clusters": [{"name": "health"}, {"name": "mine"}]},
        "stats_flush_interval": "10s",
    }
    for wrong, words in (
        ({"node": {"id": "mine"}}, r"bootstrap\.node\.id is set by the gateway"),
        ({"node": []}, r"bootstrap\.node is set by the gateway"),
        (
            {"static_resources": {"clusters": [{"name": "health"}]}},
            r"clusters has one named 'health' already",
        ),
    ):
        with pytest.raises(EnvoyFileUnfit, match=words):
            merge(ours, wrong, Path("f"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "it is not valid YAML"),
        ("listeners: []", "listeners: Extra inputs.*it may hold `bootstrap`"),
        ("bootstrap: []", "bootstrap: .*dictionary"),
        ("http_filters: {}", "http_filters: .*list"),
        ("[]", "it may hold"),
    ],
)
def test_a_file_of_settings_that_is_none_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(text)
    with pytest.raises(EnvoyFileUnfit, match=words):
        read_expert(path)
    with pytest.raises(EnvoyFileUnfit, match="No such file"):
        read_expert(tmp_path / "none.yaml")


def test_an_empty_file_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text("# nothing yet\n")
    assert read_expert(path).bootstrap == {}
