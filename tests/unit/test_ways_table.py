"""The ways of starting a run: every pair is run, and the tables of the docs are those of the stored results."""

import itertools
from pathlib import Path

import pytest

from tests.ways import run
from tests.ways.design import PLACES, SENT, WAYS, WRONG, cases, covering
from tests.ways.run import PAGE, Cell, missing, store, updated


def test_every_two_of_a_way_what_is_sent_and_a_place_are_run_together() -> None:
    rows = [(case.way, case.sent, case.place) for case in cases() if not case.is_wrong]
    assert len(rows) == 25
    for (i, first), (j, second) in itertools.combinations(enumerate((WAYS, SENT, PLACES)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(first, second))


def test_every_way_is_given_something_wrong_in_every_place() -> None:
    rows = [(case.way, case.sent, case.place) for case in cases() if case.is_wrong]
    assert {(way, place) for way, _, place in rows} == set(itertools.product(WAYS, PLACES))
    assert {(way, wrong) for way, wrong, _ in rows} == set(itertools.product(WAYS, WRONG))


def test_lists_that_a_latin_square_does_not_cover_are_refused() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        covering(["a"], ["b", "c"], ["d"])


def test_the_page_has_the_tables_of_the_stored_results() -> None:
    assert PAGE.read_text() == updated(PAGE.read_text()), "run `make ways`, or write the tables again"


def test_the_stored_results_are_those_of_the_cases_and_all_are_good() -> None:
    for place in PLACES:
        found = run.stored(place)
        assert set(found) <= {case.name for case in cases() if case.place == place}
        assert [name for name, cell in found.items() if not cell.is_good] == []


def test_a_run_is_resumed_and_what_went_well_on_other_sources_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{run.BEGIN}\n{run.END}\nafter\n")
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "PAGE", page)
    monkeypatch.setattr(run, "code_digest", lambda: "now")
    here = {case.name: case for case in cases() if case.place == "slurm"}
    one, two, three, *rest = here.values()
    store(two, Cell("completed", 0, "a file", seconds=3.2, code="before"))
    store(one, Cell("completed", 0, "a file", seconds=3.2, code="now"))
    store(three, Cell("failed", 1, "a file", "not | here", code="now"))
    assert [case.name for case in missing("slurm", (), again=False)] == [
        each.name for each in (two, three, *rest)
    ]
    assert missing("slurm", [one.name], again=True) == [one]
    assert "Slurm, a file: exit 0, 3 s" in page.read_text()
    assert "Slurm, a file: **failed**, exit 1" in page.read_text()
