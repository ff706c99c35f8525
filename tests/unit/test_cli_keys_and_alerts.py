"""`serin keys` and `serin alerts` on the command line."""

import io
import json
import os
import pwd
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from serin.cluster.shared_keys import KEY as SHARED
from serin.formats.cluster.leader import KEY as LEADER
from serin.host.state import write_stack
from serin.host.wiring import key_file
from serin.machine import environment
from serin.monitoring.alerts.book import AlertBook
from serin.store.objects import FolderObjects
from tests.fakes.rollout import home_journals
from tests.fakes.webhooks import webhook
from tests.kit.commands import serin_main as serin
from tests.kit.stacks import stack_in
from tests.unit.monitoring.test_alert_book import ALERT


def test_keys_are_made_listed_and_revoked_from_the_command_line(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serin("keys", "create", "ada", "--model", "delays", "--lasts", "90d") == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert key.startswith("serin_")
    assert "no gateway is running here" in said.err
    assert key not in said.err
    assert serin("keys", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["required"] is True
    assert [(entry["name"], entry["state"], entry["models"]) for entry in listed["keys"]] == [
        ("ada", "good", ["delays"])
    ]
    assert listed["keys"][0]["expires"] - listed["keys"][0]["made"] == 90 * 86400
    assert serin("keys", "remove", "ada") == 0
    assert serin("keys", "list") == 0
    assert "revoked" in capsys.readouterr().out
    assert serin("keys", "require", "--off") == 0
    assert "anyone who can reach the gateway's port gets answers" in capsys.readouterr().out
    assert key not in (home / "keys.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "ada", "--lasts", "soon"), "'soon' is not a valid duration"),
        (("create", "ada", "--lasts", "0s"), "must be longer than 0"),
        (("create", "Ada"), "a name is made of"),
        (("create", "ada", "--model", "../x"), "a model's name is made of"),
        (("remove", "ada"), "there is no such key"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_code_2(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert serin("keys", *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_gateway_that_other_machines_reach_keeps_requiring_keys(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up = stack_in(home, gateway_port=8080, tls=True, address="0.0.0.0", pages_port=8443)
    assert (up.gateway_url, up.is_public) == ("https://127.0.0.1:8080", True)
    assert replace(up, address="10.0.0.7").gateway_url == "https://10.0.0.7:8080"
    assert replace(up, address="2001:db8::7").pages_url == "https://[2001:db8::7]:8443"
    assert serin("keys", "require") == 0
    assert serin("keys", "require", "--off") == 1
    assert "--address 0.0.0.0), so keys stay required; run `serin down` first" in capsys.readouterr().err
    assert key_file(home).read().required
    write_stack(replace(up, address="127.0.0.1"))
    assert serin("keys", "require", "--off") == 0


def test_keys_of_a_home_become_those_of_all_hosts_and_are_changed_from_any_machine(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on Kubernetes, where the first keys come from a secret."""
    store = tmp_path / "shared"
    monkeypatch.setenv("SERIN_STORE", str(store))
    assert serin("keys", "share") == 1
    assert "no controller leads" in capsys.readouterr().err
    assert serin("keys", "create", "ada") == 0
    ada = capsys.readouterr().out.strip()
    FolderObjects(store).put(LEADER, b"{}")
    assert serin("keys", "create", "bob") == 1
    assert "run `serin keys share` once in the home" in capsys.readouterr().err, (
        "ada would be lost at the gateways"
    )
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "empty"))
    assert serin("keys", "share") == 1
    assert "has no keys to share" in capsys.readouterr().err
    monkeypatch.setenv("SERIN_HOME", str(home))
    assert serin("keys", "share") == 0
    assert "1 key of" in capsys.readouterr().out
    assert serin("keys", "share") == 1
    assert "share keys already" in capsys.readouterr().err
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "other"))
    assert serin("keys", "create", "bob") == 0
    assert "gateways of all hosts take the change within seconds" in capsys.readouterr().err
    monkeypatch.setenv("SERIN_HOME", str(home))
    assert serin("keys", "list", "--json") == 0
    shown = capsys.readouterr().out
    assert [entry["name"] for entry in json.loads(shown)["keys"]] == ["ada", "bob"]
    assert ada not in shown + (store / SHARED).read_text()


SECRET = "https://hooks.example.org/s3cret"


def test_alerts_are_listed_acknowledged_and_silenced(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serin("alerts", "list") == 0
    assert capsys.readouterr().out == "no open alerts\n"
    AlertBook(home).fire(ALERT, time.time())
    assert serin("alerts", "ack", ALERT.key, "--note", "on it") == 0
    assert serin("alerts", "silence", "flights/*", "--lasts", "3h", "--why", "a test") == 0
    capsys.readouterr()
    assert serin("alerts", "list", "--model", "flights", "--journal", "5") == 0
    shown = capsys.readouterr().out
    assert ALERT.title in shown
    assert "acknowledged by" in shown
    assert "silence 1: flights/*" in shown
    assert serin("alerts", "unsilence", "1") == 0
    capsys.readouterr()
    assert serin("alerts", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["open"][0]["alert"]["key"] == ALERT.key
    assert listed["open"][0]["note"] == "on it"
    assert listed["silences"] == []


def test_a_second_acknowledgement_keeps_the_first_note_unless_it_brings_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    AlertBook(home).fire(ALERT, time.time())
    monkeypatch.setenv("SERIN_HOST", "h")
    monkeypatch.setenv("USER", "ada")
    assert serin("alerts", "ack", ALERT.key, "--note", "my own bad client") == 0
    assert capsys.readouterr().out == f"{ALERT.key} is acknowledged by ada@h\n"
    monkeypatch.setenv("USER", "bob")
    assert serin("alerts", "ack", ALERT.key) == 0
    said = capsys.readouterr().out
    assert f"{ALERT.key} is already acknowledged by ada@h (my own bad client) at 20" in said
    assert serin("alerts", "list") == 0
    assert "acknowledged by ada@h (my own bad client)" in capsys.readouterr().out
    assert serin("alerts", "ack", ALERT.key, "--note", "mine now") == 0
    assert "is acknowledged by bob@h; before that it was acknowledged by ada@h (" in capsys.readouterr().out
    assert serin("alerts", "list", "--journal", "9") == 0
    listed = capsys.readouterr().out
    assert "acknowledged by bob@h (mine now)" in listed
    assert "by ada@h: my own bad client" in listed


@pytest.mark.parametrize(
    ("arguments", "hinted"),
    [
        (("--model", "nope"), True),
        (("nothing*",), True),
        (("flight/drift/*",), True),
        (("taxis",), True),
        (("--model", "taxis"), False),
        (("taxis/drift/*",), False),
        (("ta*",), False),
        (("*/drift/*",), False),
        (("flights/*",), False),
    ],
)
def test_a_silence_that_matches_no_model_and_no_open_alert_says_so(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], hinted: bool
) -> None:
    AlertBook(home).fire(ALERT, time.time())
    home_journals(home).open("taxis")
    assert serin("alerts", "silence", *arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith("silence 1 lasts until")
    assert (
        "matches no open alert and no model that was ever served here (models: taxis)" in said.err
    ) is hinted


@pytest.mark.parametrize("way", ["argument", "environment", "standard input"])
def test_a_receiver_is_added_and_its_url_is_not_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    if way == "environment":
        monkeypatch.setenv("SERIN_RECEIVER_URL", SECRET)
    if way == "standard input":
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{SECRET}\n"))
    arguments = (SECRET,) if way == "argument" else ()
    assert serin("alerts", "receivers", "add", "team", *arguments) == 0
    assert serin("alerts", "receivers", "list") == 0
    assert serin("alerts", "receivers", "list", "--json") == 0
    said = capsys.readouterr()
    assert "https://hooks.example.org/..." in said.out
    assert "s3cret" not in said.out + said.err
    assert SECRET in (home / "alerts" / "receivers.json").read_text()
    assert serin("alerts", "receivers", "remove", "team") == 0
    assert SECRET not in (home / "alerts" / "receivers.json").read_text()


def test_a_test_message_reaches_the_receiver_or_the_exit_code_is_1(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with webhook() as hook:
        assert serin("alerts", "receivers", "add", "team", hook.url) == 0
        assert serin("alerts", "test", "team") == 0
        assert [each["title"] for each in hook.got] == ["Test message from Serin"]
        hook.code = 403
        assert serin("alerts", "test") == 1
    assert "the receiver answered with 403" in capsys.readouterr().out
    assert home.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ack", "flights/drift/x"), "no alert 'flights/drift/x' is open"),
        (("silence", "x", "--lasts", "soon"), "'soon' is not a valid duration"),
        (("silence", "x", "--lasts", "0s"), "must be longer than 0"),
        (("silence",), "give either a PATTERN or --model"),
        (("silence", "x", "--model", "y"), "give either a PATTERN or --model"),
        (("receivers", "add", "team", "s3cret"), "this is not a URL"),
        (("receivers", "add", "team", "nothing://s3cret"), "apprise cannot use this URL"),
        (("receivers", "remove", "team"), "there is no such receiver"),
    ],
)
def test_a_wrong_argument_of_alerts_is_one_message_and_exit_code_2(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    del home
    assert serin("alerts", *arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "s3cret" not in said


def test_without_a_name_in_the_environment_the_user_is_the_owner_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("USER", "LOGNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert environment.user() == pwd.getpwuid(os.getuid()).pw_name

    def nobody(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert environment.user() == f"uid {os.getuid()}"
