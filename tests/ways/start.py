"""The five ways in which people start a run, each by the commands that they type."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tests.kit.commands import SERIN
from tests.kit.waiting import until
from tests.ways.design import Case
from tests.ways.place import NO_STORE, PREFECT, Done, Place
from tests.ways.projects import project_spec

_STAGES = ("etl", "train", "export")
_PIPELINE = "import sys; from serin import Pipeline; print(Pipeline.from_yaml(sys.argv[1]).run(serve=False, placed={}))"
_SCHEDULED_S = 300.0


class Started:
    """A run that is to be started at a place. `form`: what was given as its spec. `placed`: whether each stage becomes
    a run on a suitable worker; those that Prefect starts have all stages in one process."""

    def __init__(self, place: Place, case: Case) -> None:
        self.place, self.case, self.form = place, case, ""
        self.placed = place.placed and case.way in ("run", "package", "python")
        self.project = place.desk if case.is_wrong else place.write_project(case.sent, case.model)
        self.spec = self.project / "model" / "spec.yaml"

    def begin(self) -> Done:
        """Starts it and follows it to its end."""
        way = {
            "run": self._run,
            "package": self._package,
            "python": self._python,
            "deployment": self._deployment,
            "schedule": self._schedule,
        }
        return way[self.case.way]()

    def serin(self, *words: str | Path, cwd: Path | None = None, **variables: str) -> Done:
        own = {"PYTHONPATH": str(self.project), **variables}
        return self.place.run(*SERIN, *words, cwd=cwd or self.project, **own)

    def prefect(self, *words: str) -> Done:
        """On a machine that knows nothing of the project."""
        return self.place.run(*PREFECT, *words, cwd=self.place.desk)

    def _run(self) -> Done:
        if self.case.is_wrong:
            self.form = "gone.yaml" if self.case.sent == "missing" else f"{NO_STORE}/spec.yaml"
            return self.serin("run", self.form, "--no-serve", *self._placed)
        self.form = "a file"
        return self.serin("run", self.spec, "--no-serve", *self._placed)

    def _package(self) -> Done:
        """A run that was sent before, repeated from its digest alone, in a folder without the project."""
        variables = {}
        if self.case.is_wrong:
            self.form = f"package:{'0' * 64}"
            if self.case.sent == "unreadable":
                variables = {"SERIN_STORE": NO_STORE}
        else:
            self.form = self._sent()
        fresh = [word for stage in _STAGES for word in ("--fresh", stage)]
        words = ("run", self.form, "--no-serve", *self._placed, *fresh)
        return self.serin(*words, cwd=self.place.desk, PYTHONPATH="", **variables)

    def _python(self) -> Done:
        if self.case.is_wrong:
            self.form = "gone.yaml" if self.case.sent == "missing" else f"{NO_STORE}/spec.yaml"
        else:
            self.form = "a file"
        given = self.form if self.case.is_wrong else str(self.spec)
        script = _PIPELINE.format(self.placed)
        own = {"PYTHONPATH": str(self.project)}
        return self.place.run(sys.executable, "-c", script, given, cwd=self.project, **own)

    def _deployment(self) -> Done:
        given = self._for_workers()
        words = {"spec": given, "serve": False, "fresh": list(_STAGES)}
        parameters = [
            word for name, value in words.items() for word in ("--param", f"{name}={_written(value)}")
        ]
        return self.prefect("deployment", "run", "pipeline/inline", *parameters, "--watch")

    def _schedule(self) -> Done:
        """By a file of deployments, as the docs show it. The exit code is that of `prefect flow-run watch`."""
        name = self.case.model
        parameters = {"spec": self._for_workers(), "serve": False, "fresh": list(_STAGES)}
        file = self.place.desk / f"{name}.yaml"
        self.place.write(file, yaml.safe_dump(_nightly(name, parameters)))
        applied = self.place.run(*SERIN, "deploy", file, cwd=self.place.desk)
        assert applied.code == 0, applied.said
        found = self.place.call("GET", f"/deployments/name/pipeline/{name}")
        run = until(
            lambda: self._begun(found["id"]), "a scheduled run begins", within_s=_SCHEDULED_S, every_s=0.5
        )
        for schedule in self.place.call("GET", f"/deployments/{found['id']}/schedules"):
            self.place.call("DELETE", f"/deployments/{found['id']}/schedules/{schedule['id']}")
        watched = self.prefect("flow-run", "watch", run["id"])
        shown = self.place.run(*SERIN, "runs", "show", run["name"], cwd=self.place.desk)
        return Done(watched.code, watched.said + shown.said)

    def _begun(self, deployment: str) -> dict[str, Any]:
        """The first of its runs that has begun; empty: none has."""
        began = {"start_time": {"is_null_": False}}
        body = {"deployments": {"id": {"any_": [deployment]}}, "flow_runs": began}
        found = self.place.call("POST", "/flow_runs/filter", body)
        return dict(found[0]) if found else {}

    @property
    def _placed(self) -> tuple[str, ...]:
        return ("--placed",) if self.placed else ()

    def _for_workers(self) -> str | Mapping[str, Any]:
        """What the parameter `spec` of a deployment is given; `form` says it in words."""
        case, place = self.case, self.place
        if case.is_wrong:
            self.form = "/nowhere/gone.yaml" if case.sent == "missing" else f"{NO_STORE}/spec.yaml"
            return self.form
        if case.sent == "requirements" and case.way == "deployment":
            return self._inline()
        if case.sent == "spec":
            url = place.publish_spec(case.model, project_spec("spec", case.model))
            self.form = "a path on the worker" if url is None else "a URL"
            return url or str(self.spec)
        self.form = self._sent()
        return self.form

    def _inline(self) -> Mapping[str, Any]:
        """The spec itself: its module is that of a package of the environment, its table in the store."""
        self.form = "the spec as JSON"
        pushed = self.serin("tables", "push", self.spec.parent, "--json")
        assert pushed.code == 0, pushed.said
        tables = json.loads(pushed.said[pushed.said.index("{") :])["tables"]
        spec = project_spec("requirements", self.case.model)
        spec["data"]["tables"] = {"parcels": tables["parcels.parquet"]}
        spec["model"] = {"module": "shelf_tools.net:Net"}
        return spec

    def _sent(self) -> str:
        """The package of a run that `serin run` has sent and followed before, with all stages in one process."""
        done = self.serin("run", self.spec, "--no-serve")
        assert done.code == 0, done.said
        shown = self.serin("run", self.spec, "--dry-run")
        (reference,) = re.findall(r"package:[0-9a-f]{64}", shown.said)
        return str(reference)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _nightly(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A file of deployments with times that come soon."""
    begin = f"DTSTART:{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    deployment = {
        "name": name,
        "entrypoint": "flows.pipeline.pipeline",
        "parameters": dict(parameters),
        "work_pool": {"name": "cpu"},
        "schedules": [{"rrule": f"{begin}\nRRULE:FREQ=SECONDLY;INTERVAL=25;COUNT=60"}],
    }
    return {"pull": [{"serin.prefect.pull.enter_application": {}}], "deployments": [deployment]}
