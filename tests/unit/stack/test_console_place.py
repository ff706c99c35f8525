"""Where the console of a stack is, and the command that shows and changes its secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serin import cli
from serin.errors import NameInvalid, PortTaken
from serin.machine.ports import free_ports
from serin.stack.console import place
from serin.stack.console.place import choose_place, is_installed
from serin.stack.console.settings import ConsoleSettings
from serin.stack.host.ports import port_claims


def test_the_console_stays_where_it_was_unless_that_port_is_taken() -> None:
    (last,) = free_ports(1)
    with port_claims() as claims:
        first = choose_place(ConsoleSettings(), claims, last=last)
        assert (first.port, first.url) == (last, f"http://127.0.0.1:{last}")
        assert choose_place(ConsoleSettings(), claims, last=last).port != last
        with pytest.raises(PortTaken, match="SERIN_CONSOLE"):
            choose_place(ConsoleSettings(port=last), claims, last=None)


def test_behind_an_ingress_people_are_given_its_address() -> None:
    with port_claims() as claims:
        found = choose_place(ConsoleSettings(url="https://serin.example.com/"), claims, last=None)
    assert found.url == "https://serin.example.com"


def test_a_missing_package_means_that_there_is_no_console(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed()
    monkeypatch.setattr(place, "_NEEDED", ("starlette", "a_package_that_nobody_has"))
    assert not is_installed()


def test_the_command_shows_both_secrets_or_one_and_replaces_it(home: Path) -> None:
    def secret(*arguments: str) -> str:
        done = CliRunner().invoke(cli.app, ["console", "secret", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    both = json.loads(secret("--json"))
    assert set(both) == {"viewer", "operator"}
    assert both["viewer"] != both["operator"]
    assert secret("operator") == f"{both['operator']}\n"
    assert secret("operator", "--rotate") != f"{both['operator']}\n"
    assert secret("viewer") == f"{both['viewer']}\n"
    with pytest.raises(NameInvalid, match="one of viewer, operator"):
        CliRunner().invoke(cli.app, ["console", "secret", "admin"], catch_exceptions=False)
