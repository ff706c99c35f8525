"""One whole stack for the tests that need all of it: each `serin up` takes seconds of both cores.

This folder is a package, so that the stack is taken down after its last test and not at the end of all tests.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.host.process_scan import record_folder
from serin.host.state import running_stack
from serin.machine.ports import is_free
from tests.e2e.browser import find_browser, open_browser
from tests.e2e.prefect_page import PrefectPage
from tests.e2e.whole_stack import Stack


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """In the end it is taken down and has left nothing: no process, port, socket or folder of a run."""
    made = Stack(tmp_path_factory.mktemp("stack") / "home", TEAM_API_TOKEN=secrets.token_hex(16))
    try:
        with made.watched():
            made.serin("up")
            up = running_stack(made.home)
            yield made
        assert "did not stop" not in made.serin("down")
        _, _, ending = (made.home / "logs" / "supervisord.log").read_text().rpartition("stopped: reconciler")
        assert ending, "it is stopped first"
        assert "spawned: " not in ending, "nothing is started again while the stack is taken down"
        assert made.processes() == []
        assert all(is_free(port) for port in (up.gateway_port, up.prefect_port) if port)
        assert "no stack is up" in made.serin("down", code=1)
        assert [path for path in Path("/proc/net/unix").read_text().split() if str(made.home) in path] == []
        assert not record_folder(made.home).exists()
    finally:
        made.kill()


@pytest.fixture(scope="package")
def browser(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectPage | None]:
    """Prefect's page, logged in; None where there is no Chromium."""
    program = find_browser()
    if program is None:
        yield None
        return
    with open_browser(program, tmp_path_factory.mktemp("browser") / "its") as page:
        yield PrefectPage(page, stack)


@pytest.fixture
def page(browser: PrefectPage | None) -> Iterator[PrefectPage]:
    if browser is None:
        pytest.skip("no Chromium here (`make system-deps` installs it): Prefect's pages were not looked at")
    yield browser
    browser.page.open("about:blank")  # a page asks its server all the time
