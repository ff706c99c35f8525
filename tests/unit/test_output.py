from __future__ import annotations

import io
import sys
import time

import pytest
import typer

from serin.commands.output import confirm, counted, when


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
