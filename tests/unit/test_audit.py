"""Each command that is an act leaves a line with who, on what and how it ended; and no secret."""

import json
import os
import pwd
from pathlib import Path

import pytest

from serin.machine import environment
from serin.machine.audit import audit_file, write_act
from tests.kit.commands import serin

SECRET = "http://127.0.0.1:9/hook-with-a-token"


def lines(home: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in audit_file(home).read_text().splitlines()]


def test_acts_leave_lines_with_their_outcome_and_reading_leaves_none(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "somebody-else")
    home.mkdir()
    key = serin("keys", "create", "ci", "--model", "fraud-*", "--role", "release").splitlines()[-1]
    serin("keys", "create", "ci", code=1)
    serin("keys", "create", "odd", "--role", "root", code=1)
    serin("alerts", "receivers", "add", "team", SECRET)
    serin("alerts", "silence", "fraud-eu/*", "--lasts", "1h", "--why", "a long night")
    serin("rollout", "promote", "fraud-eu", "--why", "enough", code=1)
    for reading in (("keys", "list"), ("alerts", "list"), ("gc",), ("trust", "policy")):
        serin(*reading)
    who = f"{pwd.getpwuid(os.getuid()).pw_name}@{environment.host()}"
    found = lines(home)
    assert [(each["act"], each["about"], each["outcome"]) for each in found] == [
        ("keys create --model fraud-* --role release", "ci", "done"),
        ("keys create", "ci", "failed: KeyRefused"),
        ("keys create --role root", "odd", "failed: KeyRefused"),
        ("alerts receivers add", "team", "done"),
        ("alerts silence --lasts", "fraud-eu/*", "done"),
        ("rollout promote", "fraud-eu", "failed: NotUp"),
    ]
    assert {each["who"] for each in found} == {who}
    assert [each["why"] for each in found if "why" in each] == ["a long night", "enough"]
    text = audit_file(home).read_text()
    assert key not in text
    assert SECRET not in text
    assert audit_file(home).stat().st_mode & 0o777 == 0o600


def test_an_act_does_not_fail_where_its_line_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit_file(tmp_path).mkdir()
    write_act(tmp_path, who="ada", act="rollout abort", about="fraud-eu")
    assert '"act": "rollout abort"' in caplog.text


def test_options_are_written_as_they_were_given(home: Path) -> None:
    home.mkdir()
    serin("keys", "require", "--off")
    serin("keys", "require", "--on")
    serin(
        "keys",
        "create",
        "two",
        "--model",
        "fraud-*",
        "--model",
        "payments",
        "--role",
        "view",
        "--lasts",
        "1h",
    )
    serin("trust", "policy", "--check", "gate", "--approval")
    serin("console", "secret", "operator", "--rotate")
    serin("captures", "export", "fraud-eu", "--out", "rows.parquet", code=1)
    assert [(each["act"], each.get("about", "")) for each in lines(home)] == [
        ("keys require --off", ""),
        ("keys require", ""),
        ("keys create --model fraud-* --model payments --role view --lasts", "two"),
        ("trust policy --check gate --approval", ""),
        ("console secret --rotate", "operator"),
        ("captures export --out", "fraud-eu"),
    ]


def test_a_line_makes_no_home(tmp_path: Path) -> None:
    write_act(tmp_path / "none", who="ada", act="rollout abort")
    assert list(tmp_path.iterdir()) == []


def test_a_value_begins_no_line_of_a_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_act(tmp_path, who="ada\n", act="rollout abort", about="a\x1b[2J", why="x\r\ny")
    (line,) = lines(tmp_path)
    assert (line["who"], line["about"], line["why"]) == ("ada ", "a [2J", "x  y")
