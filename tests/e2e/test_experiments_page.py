"""The pages of experiments in a real browser: by keyboard, while trainings end, on a wide and on a narrow screen."""

import importlib.resources
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from serin.console.app import build_app
from serin.host.console import ConsoleSettings, account_secret
from serin.machine.ports import free_ports
from tests.e2e.browser import Page, find_browser, open_browser
from tests.fakes.experiments import leave_search, leave_training
from tests.kit.waiting import until

CHROMIUM = find_browser()
AXE = importlib.resources.files("axe_core_python").joinpath("axe.min.js")
VIOLATIONS = "axe.run().then(r => r.violations.map(v => `${v.id}: ${v.nodes[0].html}`))"
FOCUSED = "document.activeElement.id"
LIVE = "document.readyState === 'complete' && document.getElementById('live').className === 'on'"


@contextmanager
def console(home: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    app = build_app(home, ConsoleSettings(), port)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, "the console", alive=thread.is_alive)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture
def page(home: Path, tmp_path: Path) -> Iterator[tuple[Page, str]]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with console(home) as url, open_browser(CHROMIUM, tmp_path / "browser") as opened:
        opened.open(f"{url}/login")
        opened.type_into("#secret", account_secret(home, "viewer"))
        opened.run("document.querySelector('form .strong').click()")
        opened.wait_until("!!document.getElementById('view')", "logged in")
        yield opened, url
    assert opened.complaints == []


def press(page: Page, key: str, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        text = " " if key == " " else "\r" if key == "Enter" else ""
        typed = {"text": text} if text and kind == "keyDown" else {}
        page.call(
            "Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key,
            windowsVirtualKeyCode=code, **typed,
        )  # fmt: skip


def test_trainings_are_chosen_by_keyboard_compared_and_kept_through_an_update(
    home: Path, page: tuple[Page, str]
) -> None:
    browser, url = page
    runs = [
        leave_training(home, began=time.time() - 60 * at, seed=at, auc=0.75 + at / 100) for at in range(3)
    ]
    browser.open(f"{url}/experiments")
    browser.wait_for("3 of 3 trainings")
    browser.wait_until(LIVE, "the page is live")
    browser.run("document.getElementById('filter-text').focus()")
    chosen = list[str]()
    for _ in range(60):
        press(browser, "Tab", 9)
        name = str(browser.run(FOCUSED))
        if name.startswith("pick-") and len(chosen) < 2:
            press(browser, " ", 32)
            chosen.append(name.removeprefix("pick-"))
    assert chosen == runs[:2]
    browser.type_into("#filter-text", "half typed")
    leave_training(home, began=time.time(), seed=9, auc=0.9)
    browser.wait_for("4 of 4 trainings")
    picked = "[...document.querySelectorAll('.pick input:checked')].map(e => e.value).join()"
    assert browser.run(picked) == ",".join(chosen), "an update undid what the reader has chosen"
    assert browser.run("document.getElementById('filter-text').value") == "half typed"
    browser.run("document.querySelector('.above button').focus()")
    press(browser, "Enter", 13)
    text = browser.wait_for("Trainings side by side", "Settings that differ", "Curves")
    assert "training.seed" in text
    assert browser.run("document.querySelectorAll('.sides thead th').length") == 3


def test_pages_of_experiments_are_accessible_and_fit_narrow_and_wide_screens(
    home: Path, tmp_path: Path, page: tuple[Page, str]
) -> None:
    browser, url = page
    runs = [leave_training(home, began=time.time() - 60 * at, seed=at) for at in range(60)]
    search = leave_search(home)
    paths = (
        "/experiments", "/experiments?sort=-metric&page=2", f"/experiments/compare?run={runs[0]}&run={runs[1]}",
        "/experiments/searches", f"/experiments/searches/{search}",
    )  # fmt: skip
    for width in (400, 1400):
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False
        )
        for number, path in enumerate(paths):
            browser.open(f"{url}{path}")
            browser.wait_until(f"location.href.endsWith({path!r}) && {LIVE}", path)
            root = "document.documentElement"
            assert browser.run(f"{root}.scrollWidth <= {root}.clientWidth"), f"{path} is wider than {width}"
            browser.picture(tmp_path / f"{number}-{width}.png")
            browser.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
            assert browser.run(VIOLATIONS) == [], path
