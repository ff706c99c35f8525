"""The console of a whole stack in a real browser, while clients call a model: a rollout is followed and another
aborted."""

import importlib.resources
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serin.host.console import Account, account_secret
from serin.host.state import running_stack
from serin.rollout.decide.plan import Plan
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.status import history, model_status
from serin.store.artifacts import Endpoint
from serin.store.store import Store
from tests.e2e.browser import Page, find_browser, open_browser
from tests.e2e.external_scene import asking
from tests.e2e.whole_stack import Stack, until
from tests.fakes.kserve import MODEL, KServe, serving
from tests.kit.elsewhere import register
from tests.kit.web import Handler, web_server

CHROMIUM = find_browser()
# Wide margins: what is shown here is the page, not the power.
QUICK = Plan(
    steps=(50.0, 100.0), step_s=1.0, min_requests=20, margin=1.0, bad_margin=4.0, quantiles=(0.5,), bake_s=1.0,
    deadline_s=300.0, drain_s=1.0, false_rollback=0.01, false_promotion=0.2, warmup_s=0.5,
)  # fmt: skip
STUCK = Plan(steps=(20.0, 100.0), step_s=3600.0, deadline_s=7200.0, drain_s=1.0)
ROLLOUT = f"/models/{MODEL}/rollout"
VIEWS = [
    "/", "/rollouts", "/alerts", "/experiments", "/experiments/searches", "/runs", "/gpus",
    f"/models/{MODEL}", f"/models/{MODEL}/traffic",
    f"/models/{MODEL}/drift", f"/models/{MODEL}/quality", f"/models/{MODEL}/captures", ROLLOUT,
]  # fmt: skip
AXE = importlib.resources.files("axe_core_python").joinpath("axe.min.js")
VIOLATIONS = "axe.run().then(r => r.violations.map(v => `${v.id}: ${v.nodes[0].html}`))"


UNFOLDED = """(() => {
  const shown = document.createElement("details");
  shown.open = true;
  document.body.append(shown);
  Idiomorph.morph(shown, "<details><p>new</p></details>", {morphStyle: "outerHTML"});
  const still = shown.open && shown.textContent === "new";
  shown.remove();
  return still;
})()"""


def start(home: Path, server: KServe, plan: Plan) -> int:
    place = Endpoint(http=server.address, grpc=server.address, elsewhere=True)
    version = register(Store(str(home / "store")), MODEL, place).version
    command = Command(kind="start", model=MODEL, version=version, by="test", plan=plan)
    answer = home_rollouts(home).mailbox.ask(command, timeout_s=60)
    assert answer.accepted, answer.reason
    return version


def phase(home: Path) -> str:
    found = model_status(home, MODEL)
    return found.rollout.phase if found else ""


def log_in(page: Page, url: str, home: Path, role: Account) -> None:
    page.open(f"{url}/login")
    page.type_into("#secret", account_secret(home, role))
    page.type_into("#name", "Ada")
    page.run("document.querySelector('form .strong').click()")
    page.wait_until("!!document.getElementById('view')", f"logged in as {role}")


def look(page: Page, url: str, folder: Path) -> None:
    """Opens each view, takes its picture and asks axe-core for violations. The reader is in India."""
    page.call("Emulation.setTimezoneOverride", timezoneId="Asia/Kolkata")
    times = list[str]()
    for path in VIEWS:
        page.open(f"{url}{path}")
        shown = f"location.pathname === {json.dumps(path)} && document.readyState === 'complete'"
        page.wait_until(f"{shown} && document.getElementById('live').className === 'on'", path)
        assert len(page.picture(folder / f"{path.strip('/').replace('/', '-') or 'models'}.png")) > 10_000
        page.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
        assert page.run(VIOLATIONS) == [], path
        times += page.run("[...document.querySelectorAll('#view time')].map(each => each.textContent)")
    assert page.run(UNFOLDED), "an update folds what the reader has unfolded"
    assert times
    assert [each for each in times if not each.endswith("GMT+5:30")] == []


@contextmanager
def page_elsewhere(target: str, rollout: str) -> Iterator[str]:
    """A site on another port of this host, whose page sends a form to the console. The browser counts it as the same
    site, so the cookie goes with it."""
    form = f'<form method="post" action="{target}"><input name="rollout" value="{rollout}"><button>x</button></form>'

    class Form(Handler):
        def do_GET(self) -> None:
            self.answer(form.encode(), content_type="text/html")

    with web_server(Form) as port:
        yield f"http://127.0.0.1:{port}/"


def post_as_page(page: Page, path: str, fields: dict[str, Any]) -> int:
    body = "&".join(f"{name}={value}" for name, value in fields.items())
    sent = f"{{method: 'POST', body: new URLSearchParams({json.dumps(body)}), redirect: 'manual'}}"
    return int(page.run(f"fetch({json.dumps(path)}, {sent}).then(r => r.status)"))


@pytest.mark.timeout(900)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_rollout_is_followed_live_and_another_is_aborted_by_an_operator_only(
    stack: Stack, tmp_path: Path
) -> None:
    assert CHROMIUM is not None
    home, up = stack.home, running_stack(stack.home)
    url = stack.ask("status")["console"]["url"]
    with (
        serving(delay_s=0.002) as first,
        serving(delay_s=0.002) as equal,
        serving(delay_s=0.002) as third,
        open_browser(CHROMIUM, tmp_path / "browser") as page,
    ):
        start(home, first, QUICK)
        until(lambda: phase(home) == "promoted", "the first release is live", within_s=120)
        with asking(up.gateway_port) as clients:
            log_in(page, url, home, "viewer")
            page.open(f"{url}{ROLLOUT}")
            page.wait_for("promoted")
            page.run("window.unchanged = true")
            second = start(home, equal, QUICK)
            page.wait_for(f"{MODEL}-v{second} against", "shifting", "50%")
            ended = "[...document.querySelectorAll('h2 [data-phase]')].map(e => e.dataset.phase).join()"
            page.wait_until(f"{ended} === 'promoted'", "the promotion is shown", seconds=180)
            page.wait_for("Latency of both arms", "The numbers of each guard")
            page.run("document.getElementById('guards').open = true")
            page.wait_for("for it: not slower p50")
            assert page.run("window.unchanged"), "the page was loaded again"

            start(home, third, STUCK)
            until(lambda: phase(home) == "shifting", "the third one gets requests", within_s=120)
            found = model_status(home, MODEL)
            fields = {"rollout": found.rollout.id}
            assert "Abort" not in page.wait_for("shifting", "20%")
            token = page.run("document.querySelector('[name=csrf]').value")
            assert post_as_page(page, f"{ROLLOUT}/abort", {**fields, "csrf": token}) == 403
            look(page, url, tmp_path)

            page.press("Log out")
            page.wait_until("location.pathname === '/login'", "logged out")
            log_in(page, url, home, "operator")
            assert post_as_page(page, f"{ROLLOUT}/abort", {**fields, "csrf": "0" * 64}) == 403
            with page_elsewhere(f"{url}{ROLLOUT}/abort", found.rollout.id) as elsewhere:
                page.open(elsewhere)
                page.press("x")
                page.wait_for("this form was not sent from a page of the console")
            assert phase(home) == "shifting"

            page.open(f"{url}{ROLLOUT}")
            page.press("Abort")
            page.wait_for("Move all traffic back to the live version")
            page.type_into("#why", "seen enough")
            page.run("document.querySelector('button.danger').click()")
            page.wait_for("rolled back", "seen enough", "Ada (console operator)")
            until(lambda: phase(home) == "rolled_back", "the abort is complete", within_s=120)
        assert clients.errors == []
        assert clients.answered > 100
        stack.serin("retire", MODEL, "--yes")  # its servers end with this test, the stack does not
        until(lambda: phase(home) == "retired", "the model is out of service", within_s=120)
    assert page.complaints == []
    assert [each.by for each in history(home, MODEL, found.rollout.id) if each.command][
        -1
    ] == "Ada (console operator)"
    log = (home / "logs" / "console.log").read_text()
    assert not any(account_secret(home, role) in log for role in ("viewer", "operator"))
