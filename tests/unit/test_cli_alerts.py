"""`serin alerts` on the command line."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from serin.monitoring.alerts.book import AlertBook
from tests.fakes.webhooks import webhook
from tests.unit.monitoring.test_alert_book import ALERT
from tests.unit.test_cli_keys import serin

SECRET = "https://hooks.example.org/s3cret"


def test_alerts_are_listed_acknowledged_and_silenced(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serin(monkeypatch, "alerts", "list") == 0
    assert capsys.readouterr().out == "no open alerts\n"
    AlertBook(home).fire(ALERT, time.time())
    assert serin(monkeypatch, "alerts", "ack", ALERT.key, "--note", "on it") == 0
    assert serin(monkeypatch, "alerts", "silence", "flights/*", "--lasts", "3h", "--why", "a test") == 0
    capsys.readouterr()
    assert serin(monkeypatch, "alerts", "list", "--model", "flights", "--journal", "5") == 0
    shown = capsys.readouterr().out
    assert ALERT.title in shown
    assert "acknowledged by" in shown
    assert "silence 1: flights/*" in shown
    assert serin(monkeypatch, "alerts", "unsilence", "1") == 0
    capsys.readouterr()
    assert serin(monkeypatch, "alerts", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["open"][0]["alert"]["key"] == ALERT.key
    assert listed["open"][0]["note"] == "on it"
    assert listed["silences"] == []


@pytest.mark.parametrize("way", ["argument", "environment", "standard input"])
def test_a_receiver_is_added_and_its_url_is_not_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    if way == "environment":
        monkeypatch.setenv("SERIN_RECEIVER_URL", SECRET)
    if way == "standard input":
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{SECRET}\n"))
    arguments = (SECRET,) if way == "argument" else ()
    assert serin(monkeypatch, "alerts", "receivers", "add", "team", *arguments) == 0
    assert serin(monkeypatch, "alerts", "receivers", "list") == 0
    assert serin(monkeypatch, "alerts", "receivers", "list", "--json") == 0
    said = capsys.readouterr()
    assert "https://hooks.example.org/..." in said.out
    assert "s3cret" not in said.out + said.err
    assert SECRET in (home / "alerts" / "receivers.json").read_text()
    assert serin(monkeypatch, "alerts", "receivers", "remove", "team") == 0
    assert SECRET not in (home / "alerts" / "receivers.json").read_text()


def test_a_test_message_reaches_the_receiver_or_the_exit_code_is_1(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with webhook() as hook:
        assert serin(monkeypatch, "alerts", "receivers", "add", "team", hook.url) == 0
        assert serin(monkeypatch, "alerts", "test", "team") == 0
        assert [each["title"] for each in hook.got] == ["Test message from Serin"]
        hook.code = 403
        assert serin(monkeypatch, "alerts", "test") == 1
    assert "the receiver answered with 403" in capsys.readouterr().out
    assert home.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ack", "flights/drift/x"), "no alert 'flights/drift/x' is open"),
        (("silence", "x", "--lasts", "soon"), "'soon' is not a valid duration"),
        (("silence", "x", "--lasts", "0s"), "a silence must be longer than 0"),
        (("silence",), "give either a PATTERN or --model"),
        (("silence", "x", "--model", "y"), "give either a PATTERN or --model"),
        (("receivers", "add", "team", "s3cret"), "this is not a URL"),
        (("receivers", "add", "team", "nothing://s3cret"), "apprise cannot use this URL"),
        (("receivers", "remove", "team"), "there is no such receiver"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_code_2(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    del home
    assert serin(monkeypatch, "alerts", *arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "s3cret" not in said
