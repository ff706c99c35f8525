"""Prefect's own page, used as a person does: logged in, with its forms for schedules and runs."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serin.host.state import running_stack
from tests.e2e.browser import Page
from tests.e2e.whole_stack import Stack, until

_TRIES = 5
_FORM = ".p-modal"
_REFUSED = "is a required property"


class PrefectPage:
    """A browser that is logged in to the Prefect server of a stack."""

    def __init__(self, page: Page, stack: Stack) -> None:
        self.page, self._stack = page, stack
        self._url = running_stack(stack.home).prefect_ui_url
        page.open(f"{self._url}/deployments")
        page.type_into("input[type=password]", stack.login)
        page.press("Login")
        page.wait_for("pipeline", "placed")

    def open(self, path: str, *words: str) -> str:
        """All that a page shows, once `words` are among it."""
        self.page.open(f"{self._url}{path}")
        return self.page.wait_for(*words)

    def add_schedule(self, deployment: str, *, every_s: int, spec: Path) -> None:
        """`spec`: overrides the parameter of the deployment."""
        self.open(f"/deployments/deployment/{self._id(deployment)}", "Schedules", "Triggers")
        self.page.press("Schedule")
        self.page.wait_for("Add schedule")
        self.page.type_into(f"{_FORM} input[type=number]", str(every_s))
        self._choose(f"{_FORM} [data-testid=interval-select]", "Seconds")
        self._choose(f"{_FORM} select[multiple]", "spec")
        self.page.type_into(f"{_FORM} textarea", str(spec))
        self.page.press("Save")
        self.page.wait_until(f"!document.querySelector('{_FORM}')", "the schedule is saved")

    def start_run(self, deployment: str, spec: Path, *, fresh: Sequence[str] = ()) -> dict[str, Any]:
        """A custom run of a deployment; returns what the server knows of it. The form takes over what was typed a
        moment later, and may lose it while it is drawn: one that was refused is opened again and given more time."""
        number = self._id(deployment)
        before = {run["id"] for run in self.runs(deployment)}
        for waited_s in range(_TRIES):
            self.open(f"/deployments/deployment/{number}/run", "spec", "fresh", "Validate parameters")
            if fresh:
                self._choose("select[multiple]", *fresh)
            self.page.type_into("textarea", str(spec))
            time.sleep(waited_s)
            self.page.press("Submit")
            left = f"!location.pathname.endsWith('/run') || document.body.innerText.includes('{_REFUSED}')"
            self.page.wait_until(left, "the form is submitted")
            if _REFUSED not in self.page.text():
                break
        else:
            raise AssertionError(f"the form was refused {_TRIES} times: {self.page.text()[:2000]}")
        (run,) = until(
            lambda: [run for run in self.runs(deployment) if run["id"] not in before],
            "the run that was started",
        )
        return run

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        """Those of a deployment that have started or wait for a worker, by the server's own interface."""
        body = {"deployments": {"id": {"any_": [self._id(deployment)]}}}
        found: list[dict[str, Any]] = self._stack.call("POST", "/flow_runs/filter", body)
        return found

    def _id(self, deployment: str) -> str:
        return str(self._stack.call("GET", f"/deployments/name/pipeline/{deployment}")["id"])

    def _choose(self, selector: str, *labels: str) -> None:
        """Chooses options of a list, and no other ones of it."""
        events = "['input', 'change'].forEach(name => e.dispatchEvent(new Event(name, {bubbles: true})))"
        mark = (
            f"[...e.options].forEach(o => o.selected = {json.dumps(labels)}.includes(o.textContent.trim()))"
        )
        found = f"document.querySelector({json.dumps(selector)})"
        self.page.wait_until(f"(e => !!e && ({mark}, {events}, true))({found})", f"{selector}: {labels}")
