"""The table of what works where is that of the stored results."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from serin.store.store import Store
from tests.parity import run
from tests.parity.place import Place, Refused
from tests.parity.run import PAGE, Cell, missing, play, store, updated
from tests.parity.scenarios import SCENARIOS, Scenario


class Nowhere(Place):
    """Every command is obeyed, and nothing is served."""

    def serin_done(
        self, words: Sequence[str], home: Path | None = None, **variables: str
    ) -> tuple[int, str, str]:
        del words, home, variables
        return 0, "", ""

    @property
    def gateways(self) -> list[str]:
        return []

    @property
    def store(self) -> Store:
        return Store(str(self.folder))

    def repositories(self, release: str) -> list[Path]:
        del release
        return []


def outcome(error: Exception | None, folder: Path) -> tuple[str, str]:
    def act(place: Place, model: str) -> None:
        if error is not None:
            raise error

    cell = play(Scenario("a shadow", act, ("shadow",), slow=False), Nowhere(folder))
    return cell.outcome, cell.why


def test_the_page_has_the_table_of_the_stored_results() -> None:
    assert PAGE.read_text() == updated(PAGE.read_text()), "run `make parity`, or write the table again"


def test_a_refusal_must_name_what_was_asked_for_and_all_else_has_failed(tmp_path: Path) -> None:
    assert outcome(None, tmp_path) == ("passed", "")
    assert outcome(Refused("shadow needs records"), tmp_path) == ("refused", "shadow needs records")
    assert outcome(Refused("no such option"), tmp_path) == ("failed", "no such option")
    assert outcome(Refused("no model 'parity-a-shadow'"), tmp_path) == (
        "failed",
        "no model 'parity-a-shadow'",
    )
    assert outcome(AssertionError("accepted, nothing happens"), tmp_path) == (
        "failed",
        "accepted, nothing happens",
    )
    assert outcome(TimeoutError("slow"), tmp_path) == ("failed", "TimeoutError: slow")


def test_a_run_is_resumed_and_what_passed_on_other_sources_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{run.BEGIN}\n{run.END}\nafter\n")
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "PAGE", page)
    monkeypatch.setattr(run, "code_digest", lambda: "now")
    store("hosts", "retire", Cell(outcome="passed", code="before"))
    store("hosts", "release", Cell(outcome="passed", code="now"))
    store("hosts", "shadow", Cell(outcome="refused", why="not a|here", code="now"))
    assert list(json.loads((tmp_path / "hosts.json").read_text())) == ["release", "shadow", "retire"]
    assert set(SCENARIOS) - set(missing("hosts", (), again=False)) == {"release"}
    assert missing("hosts", ["release"], again=True) == ["release"]
    assert "| shadow | not run | refused (1) | not run | not run |" in page.read_text()
    assert "1. shadow, three hosts: not a/here" in page.read_text()
    assert "| 0 / 0 / 0 | 2 / 1 / 0 | 0 / 0 / 0 | 0 / 0 / 0 |" in page.read_text()
