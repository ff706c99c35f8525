"""The commands of docs/how-to/rotate-secrets.md, in their order, in a home with secrets to rotate."""

import json
import re
from pathlib import Path

import pytest

from serin.host.console import account_secret, matching_account
from serin.host.wiring import key_file
from tests.kit.commands import serin

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "rotate-secrets.md"
STACK = ("down", "up")  # tests/e2e/stack starts whole stacks


def commands(heading: str) -> list[list[str]]:
    """The words of each `serin` command in the section, without variables before it and comments behind it."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL))
    lines = [line.split("#")[0].split() for line in blocks.splitlines()]
    return [words[words.index("serin") + 1 :] for words in lines if "serin" in words]


def test_a_key_is_replaced_while_both_are_valid(home: Path) -> None:
    serin("keys", "create", "ada-2026-11")
    create, listing, revoke = commands("API keys")
    serin(*create)
    assert {key.name: key.state(0.0) for key in key_file(home).read().keys} == {
        "ada-2026-11": "good",
        "ada-2026-12": "good",
    }
    serin(*listing)
    serin(*revoke)
    states = {key.name: key.state(0.0) for key in key_file(home).read().keys}
    assert states == {"ada-2026-11": "revoked", "ada-2026-12": "good"}


def test_a_secret_of_the_console_is_replaced_for_its_role_alone(home: Path) -> None:
    viewer, operator = account_secret(home, "viewer"), account_secret(home, "operator")
    rotate_viewer, rotate_operator = commands("The console")
    serin(*rotate_viewer)
    assert matching_account(home, viewer) is None
    assert matching_account(home, operator) == "operator"
    assert matching_account(home, account_secret(home, "viewer")) == "viewer"
    serin(*rotate_operator)
    assert matching_account(home, operator) is None


def test_a_receiver_is_replaced_while_both_exist(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, try_it, remove = commands("Receivers")
    assert try_it == ["alerts", "test", "slack-2"]
    monkeypatch.setenv("SERIN_RECEIVER_URL", "http://127.0.0.1:9/old")
    serin("alerts", "receivers", "add", "slack")
    monkeypatch.setenv("SERIN_RECEIVER_URL", "http://127.0.0.1:9/new")
    serin(*add)
    serin(*remove)
    found = json.loads((home / "alerts" / "receivers.json").read_text())["receivers"]
    assert found == [{"name": "slack-2", "url": "http://127.0.0.1:9/new"}]


def test_every_command_of_the_page_was_run() -> None:
    every = {
        " ".join(words) for heading in ("API keys", "The console", "Receivers") for words in commands(heading)
    }
    others = {words[0] for words in commands("Prefect")}
    shown = len(re.findall(r"^(?:\w+=\S+\)?\"? )*serin |new-url\)\" serin ", PAGE.read_text(), re.MULTILINE))
    assert others == set(STACK)
    assert shown == len(every) + len(others)
