"""Each command that is an act leaves a line with who, on what and how it ended; and no secret."""

import json
from pathlib import Path

import pytest

from serin.machine import environment
from serin.machine.audit import audit_file, write_act
from tests.kit.commands import serin

SECRET = "http://127.0.0.1:9/hook-with-a-token"


def lines(home: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in audit_file(home).read_text().splitlines()]


def test_acts_leave_lines_with_their_outcome_and_reading_leaves_none(home: Path) -> None:
    key = serin("keys", "create", "ci", "--model", "fraud-*", "--role", "release").splitlines()[-1]
    serin("keys", "create", "ci", code=1)
    serin("keys", "create", "odd", "--role", "root", code=1)
    serin("alerts", "receivers", "add", "team", SECRET)
    serin("alerts", "silence", "fraud-eu/*", "--lasts", "1h", "--why", "a long night")
    serin("rollout", "promote", "fraud-eu", "--why", "enough", code=1)
    for reading in (("keys", "list"), ("alerts", "list"), ("gc",), ("trust", "policy")):
        serin(*reading)
    who = environment.actor()
    assert who == f"{environment.user()}@{environment.host()}"
    found = lines(home)
    assert [(each["act"], each["about"], each["outcome"]) for each in found] == [
        ("keys create --role", "ci", "done"),
        ("keys create", "ci", "failed: KeyRefused"),
        ("keys create --role", "odd", "failed: KeyRefused"),
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
