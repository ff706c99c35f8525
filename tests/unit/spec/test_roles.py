"""The table of acts: complete, and what a grant covers."""

import re
from typing import Any

import pytest
from pydantic import ValidationError
from typer.main import get_command

from serin.cli import app
from serin.console.actions import ACTIONS, ON_ALERTS
from serin.console.state import act_of
from serin.spec.roles import ACTS, NOTHING, ROLES, Access, Grant
from tests.architecture.sources import ROOT
from tests.kit.acts import NOT_TRIED, OF_AN_ACCOUNT, SHOWN, STORED, WRITTEN

PAGE = ROOT / "docs" / "how-to" / "roles.md"


def commands(group: Any, path: tuple[str, ...] = ()) -> list[str]:
    """The names of all commands, with those of their groups."""
    if not hasattr(group, "commands"):
        return [" ".join(path)]
    return [name for each, command in group.commands.items() for name in commands(command, (*path, each))]


def test_every_command_has_a_place_in_the_table() -> None:
    found = commands(get_command(app))
    assert sorted(found) == sorted(ACTS), (
        "add a new command to serin/spec/roles.py, and an act to docs/how-to/roles.md"
    )


def test_the_page_has_the_table_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (view|release|administer|none) \| (.+) \|$", text, re.MULTILINE)
    listed = {
        act: None if role == "none" else role for role, acts in rows for act in re.findall(r"`([^`]+)`", acts)
    }
    assert listed == ACTS


def test_each_act_is_tried_or_named_and_the_page_says_where() -> None:
    shown = {act for acts in SHOWN.values() for act in acts}
    tried = {
        "the console, with a form": {*map(act_of, ACTIONS), *ON_ALERTS.values()},
        "the console, with a page": shown,
        "the rules of a shared store, for the command": {*STORED},
        "the rules of a shared store, for what the command writes": {*WRITTEN},
        "the account on the machine, or at the Prefect server": {*OF_AN_ACCOUNT},
        "the account on the machine, not tried": {*NOT_TRIED},
    }
    text = PAGE.read_text(encoding="utf-8").partition("### What enforces the table")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (the [^|]+) \| (.+) \|$", text, re.MULTILINE)
    assert {by: re.findall(r"`([^`]+)`", acts) for by, acts in rows} == {
        by: sorted(acts) for by, acts in tried.items()
    }
    assert {act for acts in tried.values() for act in acts} == ACTS.keys()


@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        ("*", ("fraud", "a", None), ()),
        ("fraud", ("fraud",), ("fraudulent", "fraud-eu", "frau", "Fraud", "fraud*", "", None)),
        ("fraud-*", ("fraud-eu", "fraud-"), ("fraud", "fraudulent", "FRAUD-EU", "x-fraud-eu", "", None)),
        ("fraud*", ("fraud", "fraudulent", "fraud-eu"), ("frau", "", None)),
    ],
)
def test_a_pattern_is_a_name_or_the_beginning_of_names(
    pattern: str, covered: tuple[str | None, ...], not_covered: tuple[str | None, ...]
) -> None:
    grant = Grant(models=pattern, role="view")
    assert [grant.covers(model) for model in covered] == [True] * len(covered)
    assert [grant.covers(model) for model in not_covered] == [False] * len(not_covered)


@pytest.mark.parametrize(
    "pattern", ["", "**", "*-eu", "fr*ud", "fraud?", "[a-z]*", "Fraud*", "fraud-*,x", "a" * 64]
)
def test_anything_else_is_not_a_pattern(pattern: str) -> None:
    with pytest.raises(ValidationError):
        Grant(models=pattern, role="view")


def test_a_role_contains_those_before_it_and_grants_add_up() -> None:
    for role in ROLES:
        access = Access.of(("fraud-*",), role)
        for act, least in ACTS.items():
            may = least is None or ROLES.index(role) >= ROLES.index(least)
            assert (act, access.may(act, "fraud-eu")) == (act, may)
            assert access.may(act, "payments") is (least is None)
            assert access.may(act, None) is (least is None), "what is of no model needs the role for all"
    both = Access(Access.of(("fraud-*",), "view").grants | Access.of(("payments",), "release").grants)
    assert [both.may("retire", model) for model in ("fraud-eu", "payments", "payments-2")] == [
        False,
        True,
        False,
    ]
    assert both.sees("")
    assert not NOTHING.sees("")
    assert not both.sees_all
