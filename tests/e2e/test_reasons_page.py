"""The page of a recorded request in a real browser: found by its id, explained by another process, in both palettes."""

import json
from pathlib import Path

import pytest

from serin.console.views import reasons
from tests.e2e.browser import Page, find_browser
from tests.e2e.test_experiments_page import AXE, VIOLATIONS, page, press
from tests.fakes.recorded_answers import MODEL, make_model, record, some_flights

__all__ = ["page"]
CHROMIUM = find_browser()
SHOWN_S = 180.0  # another process loads a model
CAPTURE = {"share": 1.0, "mask": ["tailnum"]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a request of three rows, and one whose answer was another."""
    home = tmp_path / "home"
    monkeypatch.setenv("SERIN_HOME", str(home))
    monkeypatch.setattr(reasons, "_NICE", 0)  # other tests would keep it from ever being done
    model = make_model(tmp_path, str(home / "store"), monitoring={"capture": CAPTURE})
    record(home, model.base, tmp_path / "one", some_flights(310, 3), ["batch-1"] * 3)
    record(home, model.base, tmp_path / "two", some_flights(320, 1), ["other"], _answer_score=[0.125])
    return home


def settle(browser: Page, path: str) -> None:
    browser.wait_until(f"location.href.endsWith({path!r}) && document.readyState === 'complete'", path)


def test_a_recorded_request_is_found_and_its_answer_explained(
    home: Path, tmp_path: Path, page: tuple[Page, str]
) -> None:
    browser, url = page
    browser.open(f"{url}/models/{MODEL}/captures")
    browser.wait_for("Newest requests recorded on this host", "batch-1", "other")
    browser.run("document.querySelector('a[href$=\"id=batch-1\"]').focus()")
    press(browser, "Enter", 13)
    browser.wait_for("Answered by", "flights-v1", "Row 0 of 0 to 2", "What each column adds", seconds=SHOWN_S)
    assert "tailnum is masked: what is shown is computed with null in its place" in browser.text()
    assert "seats is looked up by tailnum, which was not recorded" in browser.text()
    label = browser.run("document.querySelector('#view svg').getAttribute('aria-label')")
    assert label.startswith("Contributions to the margin: ")
    assert "tailnum (masked) " in label
    browser.run("document.querySelector('summary').click()")
    cells = browser.run(
        "[...document.querySelectorAll('#view tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    by_name = {name: (value, source, adds) for name, value, source, adds in cells}
    assert by_name["tailnum"][:2] == ("masked", "request")
    assert by_name["seats"][1] == "lookup in planes by tailnum"
    drawn = dict(part.rsplit(" ", 1) for part in label.partition(": ")[2].split(", "))
    assert {name.removesuffix(" (masked)"): adds for name, adds in drawn.items()} == {
        name: adds for name, (_, _, adds) in by_name.items()
    }
    look(browser, tmp_path)
    browser.run("document.querySelector('a[rel=next]').click()")
    settle(browser, "row=1")
    browser.wait_for("Row 1 of 0 to 2", seconds=SHOWN_S)
    browser.open(f"{url}/models/{MODEL}/request?id=other")
    browser.wait_for(
        "Not the same answer: the recorded answer is 0.125, computed again it is", seconds=SHOWN_S
    )
    browser.open(f"{url}/models/{MODEL}/request")
    browser.wait_for("Give the id of a request")
    browser.type_into("#request-id", "--help&<b>")
    browser.run("document.querySelector('#view form button').click()")
    browser.wait_for("there is no record of request '--help&<b>'", seconds=SHOWN_S)


def look(browser: Page, folder: Path) -> None:
    """Takes pictures in both palettes on narrow and wide screens, and asks axe-core for violations."""
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=features)
        for width in (400, 1400):
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=1000,
                deviceScaleFactor=1,
                mobile=False,
            )
            root = "document.documentElement"
            assert browser.run(f"{root}.scrollWidth <= {root}.clientWidth"), f"wider than {width}"
            assert len(browser.picture(folder / f"request-{scheme}-{width}.png")) > 10_000
            browser.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
            assert json.dumps(browser.run(VIOLATIONS)) == "[]", scheme
