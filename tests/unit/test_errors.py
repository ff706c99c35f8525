"""Errors and what is printed of them."""

import ast
import inspect
import io
import pickle
import sys
import time
from pathlib import Path
from typing import get_type_hints

import pytest
import typer

from serin import errors
from serin.commands.output import confirm, counted, when
from serin.errors import JoinNotManyToOne, Preempted, SerinError, SpecError, WorkerFailed, fields_of, nearest

ROOT = Path(__file__).parents[2]
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SerinError)]


def test_an_error_survives_pickling_with_its_fields() -> None:
    error = JoinNotManyToOne(table="weather", on=["origin"], key="EWR", matches=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is JoinNotManyToOne
    assert (str(again), again.fields) == (str(error), error.fields)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if hasattr(kind, "template")], ids=lambda kind: kind.__name__
)
def test_a_message_is_made_of_the_fields_alone(kind: type[SerinError]) -> None:
    error = kind(**{name: _example(kind, name) for name in fields_of(kind)})
    assert str(error).strip()
    assert "{" not in str(error).replace("columns: {", "")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def _example(kind: type[SerinError], field: str) -> object:
    hint = str(get_type_hints(kind).get(field, ""))
    if hint in map(str, (int, float, bool)) or f"{{{field}:" in kind.template:
        return 3
    if f"{{{field}[" in kind.template:
        return ("a", "b")
    if "tuple[str, str]" in hint:
        return [("a", "b")]
    return ["a"] if "Iterable" in hint else "a"


@pytest.mark.parametrize("folder", ["serin", "flows", "tasks", "examples", "benchmarks"])
def test_all_fields_of_an_error_and_no_other_are_given_where_it_is_raised(folder: str) -> None:
    kinds = {kind.__name__: kind for kind in KINDS}
    calls = [
        (f"{path}:{node.lineno}", kinds[node.func.id], {keyword.arg for keyword in node.keywords})
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds
    ]
    wrong = [
        f"{place}: {kind.__name__}"
        for place, kind, given in calls
        if None not in given
        and (
            given - set(fields_of(kind))
            or {name for name in fields_of(kind) if not hasattr(kind, name)} - given
        )
    ]
    assert wrong == []


def test_an_unknown_or_missing_field_is_refused() -> None:
    with pytest.raises(TypeError, match="WorkerFailed takes the fields"):
        WorkerFailed(rank=0, exit_code=1, log="log")
    with pytest.raises(TypeError, match="takes the fields"):
        WorkerFailed(rank=0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_tree_in_the_docstring_names_every_error(kind: type[SerinError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


def test_exit_codes_tell_a_bad_spec_from_a_failure_from_a_preemption() -> None:
    codes = (SpecError.exit_code, WorkerFailed.exit_code, Preempted.exit_code)
    assert codes == (2, 1, 75)


def test_the_nearest_known_word_is_offered() -> None:
    assert nearest("normalise", ["normalize", "clip"]) == "; did you mean 'normalize'?"
    assert nearest("zzz", ["a", "b"]) == "; known: a, b"
    assert nearest("zzz", []) == ""


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("wieght", "; did you mean 'weight'?"),
        ("WEIGHT", "; did you mean 'weight'?"),
        ("sise", "; did you mean 'Size'?"),
        ("wait", "; known: Size, carrier, weight"),
        ("target", "; known: Size, carrier, weight"),
    ],
)
def test_only_a_close_word_is_suggested_and_else_all_are_named(word: str, says: str) -> None:
    assert nearest(word, ["weight", "Size", "carrier"]) == says


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "goes_through"), [("y", True), ("n", False), ("", False)])
def test_a_person_on_a_terminal_is_asked_and_silence_means_no(
    monkeypatch: pytest.MonkeyPatch, typed: str, goes_through: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(f"{typed}\n"))
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    if goes_through:
        confirm("Delete all versions?", yes=False)
    else:
        with pytest.raises(typer.Abort):
            confirm("Delete all versions?", yes=False)
    assert "Delete all versions?" in screen.getvalue()


def test_a_script_says_yes_with_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(typer.Exit) as end:
        confirm("Delete all versions?", yes=False)
    assert end.value.exit_code == 2
    assert "no terminal to ask on: add --yes. Nothing was changed." in capsys.readouterr().err
    confirm("Delete all versions?", yes=True)


def test_a_time_is_shown_in_utc_and_says_so_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert when(1_700_000_000.0) == "2023-11-14 22:13:20 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1200, "1,200 rows")]
)
def test_a_noun_agrees_with_its_number(number: int, told: str) -> None:
    assert counted(number, "row") == told
    assert counted(number, "is here", "are here").split()[1] == ("is" if number == 1 else "are")
