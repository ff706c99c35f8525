from __future__ import annotations

import json
from pathlib import Path

import pytest

from serin import cli


def serin(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["serin", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_keys_are_made_listed_and_revoked_from_the_command_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serin(monkeypatch, "keys", "create", "ada", "--model", "delays", "--lasts", "90d") == 0
    said = capsys.readouterr()
    key = said.out.strip()
    assert key.startswith("serin_")
    assert "no gateway is running here" in said.err
    assert key not in said.err
    assert serin(monkeypatch, "keys", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["required"] is True
    assert [(entry["name"], entry["state"], entry["models"]) for entry in listed["keys"]] == [
        ("ada", "good", ["delays"])
    ]
    assert listed["keys"][0]["expires"] - listed["keys"][0]["made"] == 90 * 86400
    assert serin(monkeypatch, "keys", "revoke", "ada") == 0
    assert serin(monkeypatch, "keys", "list") == 0
    assert "revoked" in capsys.readouterr().out
    assert serin(monkeypatch, "keys", "require", "--off") == 0
    assert "anyone who can reach the gateway's port gets answers" in capsys.readouterr().out
    assert key not in (home / "keys.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "ada", "--lasts", "soon"), "'soon' is not a valid duration"),
        (("create", "ada", "--lasts", "0s"), "the lifetime of a key must be longer than 0"),
        (("create", "Ada"), "a name is made of"),
        (("create", "ada", "--model", "../x"), "not a valid model name"),
        (("revoke", "ada"), "there is no such key"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_code_2(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    assert serin(monkeypatch, "keys", *arguments) == 2
    assert words in capsys.readouterr().err
