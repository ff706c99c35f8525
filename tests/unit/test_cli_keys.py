from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from serin import cli
from serin.machine.process_identity import start_ticks
from serin.stack.host.state import Stack, write_stack
from serin.stack.wiring import key_file


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


def test_a_gateway_that_other_machines_reach_keeps_requiring_keys(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    up = Stack(
        home=home, supervisor_pid=os.getpid(), supervisor_ticks=start_ticks(os.getpid()) or 0, gateway_port=8080,
        prefect_api_url="", prefect_port=None, since=0.0, tls=True, address="0.0.0.0", pages_port=8443,
    )  # fmt: skip
    home.mkdir(exist_ok=True)
    write_stack(up)
    assert (up.gateway_url, up.is_public) == ("https://127.0.0.1:8080", True)
    assert replace(up, address="10.0.0.7").gateway_url == "https://10.0.0.7:8080"
    assert replace(up, address="2001:db8::7").pages_url == "https://[2001:db8::7]:8443"
    assert serin(monkeypatch, "keys", "require") == 0
    assert serin(monkeypatch, "keys", "require", "--off") == 1
    assert "--address 0.0.0.0), so keys stay required; run `serin down` first" in capsys.readouterr().err
    assert key_file(home).read().required
    write_stack(replace(up, address="127.0.0.1"))
    assert serin(monkeypatch, "keys", "require", "--off") == 0
