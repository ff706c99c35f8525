"""The status of the stack: its processes, the models behind the gateway, their recent latency. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from serin.errors import NameInvalid, PrefectGone, PrefectRefused
from serin.formats.serving.request_log import read_since
from serin.host.guard import Guard, read_guard
from serin.host.metrics_address import metrics_url
from serin.host.state import POOLS, Stack, read_stack
from serin.host.supervisor import Child, find_supervisor, process_line, with_problems
from serin.host.wiring import CONSOLE, WATCHER, build_gateway, request_log
from serin.machine.contained import contained
from serin.monitoring.alerts.alert import AlertRecord
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.latency import ReleaseLatency, summarise
from serin.monitoring.objectives.read import ObjectivesView, budget_words, read_objectives
from serin.prefect import rest_api
from serin.prefect.login import find_server
from serin.rollout.run.status import ModelStatus, problems
from serin.rollout.run.status import status as rollout_statuses
from serin.serving.external import External
from serin.serving.triton.probe import KnownReleases, ReleaseState
from serin.store.artifacts import Release
from serin.store.store import Store

WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    url: str
    ready: bool

    def __str__(self) -> str:
        return f"{self.url}  {'ready' if self.ready else 'NOT READY'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    home: Path
    up: bool
    supervisor_problem: str = ""  # it lives and does not work
    gateway: Address | None = None
    guard: Guard | None = None
    prefect: Address | None = None  # None: serving alone, as in a container without a Prefect server
    console: Address | None = None  # None: it is not installed
    metrics: str | None = None  # where Prometheus may ask; None: the watcher has not started yet
    processes: tuple[Child, ...] = ()
    models: tuple[ModelStatus, ...] = ()
    ready: frozenset[str] = frozenset()  # names of releases that are ready
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # addresses of external servers
    latency: tuple[ReleaseLatency, ...] = field(default=())
    objectives: Mapping[str, ObjectivesView] = field(default_factory=dict)  # by model
    alerts: tuple[AlertRecord, ...] = ()  # open ones
    problems: Mapping[str, str] = field(default_factory=dict)  # by model, or by what else is concerned

    @property
    def well(self) -> bool:
        """True when everything that should run does, the gateway is open, every release with traffic is ready, and
        no file is damaged."""
        if self.problems or not self.up or self.gateway is None or (self.guard and self.guard.trouble):
            return False
        if self.supervisor_problem or any(child.frozen for child in self.processes):
            return False
        serving = {
            replace(model.release_of(release), baseline=False).name
            for model in self.models
            for release in model.releases
            if release.weight_percent > 0
        }
        processes = all(_runs(child) for child in self.processes if not _is_release(child.name))
        parts = all(part.ready for part in (self.gateway, self.prefect) if part)
        return processes and parts and serving <= self.ready

    def to_json(self) -> dict[str, Any]:
        return {
            "home": str(self.home),
            "up": self.up,
            "well": self.well,
            "supervisor": {"problem": self.supervisor_problem or None},
            "gateway": {**asdict(self.gateway), "guard": self.guard and asdict(self.guard)}
            if self.gateway
            else None,
            "prefect": asdict(self.prefect) if self.prefect else None,
            "console": asdict(self.console) if self.console else None,
            "metrics": self.metrics,
            "processes": [
                {"name": child.name, "state": child.state, "pid": child.pid, "problem": child.problem or None}
                for child in self.processes
            ],
            "models": [self._model(model) for model in self.models],
            "alerts": [asdict(each) for each in self.alerts],
            "problems": dict(self.problems),
        }

    def lines(self) -> Iterator[str]:
        """Yields the status as lines for people."""
        if not self.up or self.gateway is None:
            yield f"no stack is up in {self.home}; start one with `serin up`"
            return
        yield f"gateway  {self.gateway}"
        if self.guard:
            yield f"         {self.guard.words}"
        if self.prefect:
            yield f"Prefect  {self.prefect}"
        if self.console:
            yield f"console  {self.console}"
        if self.metrics:
            yield f"metrics  {self.metrics}  (for Prometheus)"
        if self.supervisor_problem:
            yield f"supervisor {self.supervisor_problem}"
        yield from map(process_line, self.processes)
        for model in self.models:
            yield from self._model_lines(model)
        for name, problem in self.problems.items():
            yield f"PROBLEM {name}: {problem}"
        for each in self.alerts:
            acknowledged = f" (acknowledged by {each.acknowledged_by})" if each.acknowledged_by else ""
            yield f"ALERT {each.alert.severity} {each.alert.key}: {each.alert.title}{acknowledged}"

    def _model_lines(self, model: ModelStatus) -> Iterator[str]:
        yield f"{model.name}: {_live_words(model)}"
        for release in model.releases:
            name = model.release_of(release).name
            ready = "ready" if name in self.ready else "NOT READY"
            place = f"  {self.elsewhere[name]}" if name in self.elsewhere else ""
            yield f"  {name:<24} {release.arm:<9} {release.weight_percent:6.2f}%  {ready}{place}"
            for seen in self._latency_of(name):
                speed = f"p50 {_ms(seen.p50_ms)}, p95 {_ms(seen.p95_ms)}, p99 {_ms(seen.p99_ms)}"
                yield f"    as {seen.arm}: {seen.requests_per_s:.1f} requests/s, {speed}, {seen.error_share:.2%} failed"
        if view := self.objectives.get(model.name):
            yield f"  error budget of 30 days: {', '.join(map(budget_words, view.objectives))}"
        if line := model.rollout_line():
            yield line

    def _model(self, model: ModelStatus) -> dict[str, Any]:
        releases = []
        for release in model.releases:
            name = model.release_of(release).name
            releases.append(
                {
                    "version": release.version,
                    "edition": release.edition,
                    "arm": release.arm,
                    "weight": release.weight_percent,
                    "ready": name in self.ready,
                    "elsewhere": self.elsewhere.get(name),
                    "latency": [asdict(seen) for seen in self._latency_of(name)],
                }
            )
        view = self.objectives.get(model.name)
        return {
            "name": model.name,
            "releases": releases,
            "rollout": asdict(model.rollout),
            "objectives": [asdict(each) for each in view.objectives] if view else [],
        }

    def _latency_of(self, release: str) -> list[ReleaseLatency]:
        return [seen for seen in self.latency if seen.release == release]


def read_status(home: Path, *, window_s: float | None = WINDOW_S, ask_store: bool = True) -> Status:
    """Asks every part; one that does not answer is not ready. Latencies are of the last `window_s`; None: without.
    Without asking the store, models whose versions were all deleted are shown, too."""
    stack = read_stack(home)
    if stack is None or not stack.is_alive:
        return Status(home=home, up=False, problems=problems(home))
    supervisor, problem = find_supervisor(stack)
    children = with_problems(home, supervisor.children(), time.time())
    store, found = Store.open(), problems(home)
    external = External(store)
    models, ready = list[ModelStatus](), set[str]()
    elsewhere, views = dict[str, str](), dict[str, ObjectivesView]()
    releases = KnownReleases(home / "releases", host=supervisor)
    for model in rollout_statuses(home):
        with contained(found, model.name):
            if model.live or not ask_store or store.versions(model.name):
                models.append(model)
    for model in models:
        with contained(found, model.name):
            if view := read_objectives(home, model.name):
                views[model.name] = view
            for release in map(model.release_of, model.releases):
                if external.has(release):
                    elsewhere[release.name] = external.endpoint(release).http
                if _state(release, releases, external) == "ready":
                    ready.add(release.name)
    return Status(
        home=home,
        up=True,
        supervisor_problem=problem,
        gateway=Address(url=stack.gateway_url, ready=build_gateway(home).ready()),
        guard=read_guard(home),
        prefect=_prefect(stack),
        console=_console(stack, children),
        metrics=metrics_url(home),
        processes=children,
        models=tuple(models),
        ready=frozenset(ready),
        elsewhere=elsewhere,
        latency=() if window_s is None else _latency(request_log(home), window_s),
        objectives=views,
        alerts=read_alerts(home, resolved=0).open,
        problems=found,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What a machine without a stack sees of the Prefect server that PREFECT_API_URL names. `problem`: why it cannot be
    asked. `workers`: how many are online, by pool. `models`: of the store, each with its versions and aliases."""

    home: Path
    prefect: Address
    store: str
    problem: str = ""
    workers: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, tuple[list[int], Mapping[str, int]]] = field(default_factory=dict)

    @property
    def well(self) -> bool:
        return self.prefect.ready

    def to_json(self) -> dict[str, Any]:
        server = {**asdict(self.prefect), "problem": self.problem or None, "workers": dict(self.workers)}
        models = [
            {"name": name, "versions": versions, **aliases}
            for name, (versions, aliases) in self.models.items()
        ]
        entries = {"prefect": server, "store": self.store, "models": models}
        return {"home": str(self.home), "up": False, "well": self.well, **entries}

    def lines(self) -> Iterator[str]:
        yield f"no stack is up in {self.home}; PREFECT_API_URL names a server"
        yield from self.prefect_lines()
        yield f"store    {self.store}"
        for name, (versions, aliases) in self.models.items():
            live = aliases.get("live")
            newest = f"the newest of {len(versions)} is {versions[-1]}"
            yield f"{name}: {f'version {live} is live' if live else 'no version is live'}; {newest}"

    def prefect_lines(self) -> Iterator[str]:
        yield f"Prefect  {self.prefect}{f': {self.problem}' if self.problem else ''}"
        for pool, count in self.workers.items():
            yield f"  pool {pool:<19} {f'{count} workers online' if count else 'no worker online'}"


def read_server_status(home: Path) -> ServerStatus | None:
    """None where a stack is up, or PREFECT_API_URL names no server."""
    server = find_server(home)
    if server is None or server.stack is not None:
        return None
    problem, workers = "", dict[str, int]()
    try:
        workers = {pool: rest_api.online_workers(server.api, pool) for pool in POOLS}
    except (PrefectGone, PrefectRefused) as error:
        problem = str(error)
    store = Store.open()
    return ServerStatus(
        home=home,
        prefect=Address(url=server.ui_url, ready=not problem),
        problem=problem,
        workers=workers,
        store=store.url,
        models={
            name: (versions, store.aliases(name))
            for name in store.models()
            if (versions := store.versions(name))
        },
    )


def _prefect(stack: Stack) -> Address | None:
    if not stack.prefect_api_url:
        return None
    return Address(url=stack.prefect_ui_url, ready=rest_api.answers(stack.prefect_api_url))


def _console(stack: Stack, children: tuple[Child, ...]) -> Address | None:
    if stack.console_url is None:
        return None
    running = any(child.name == CONSOLE and child.state == "running" for child in children)
    return Address(url=stack.console_url, ready=running)


def _state(release: Release, releases: KnownReleases, external: External) -> ReleaseState:
    if not external.has(release):
        return releases.state(release)
    return "absent" if release.baseline else external.state(release)


def _latency(log: Path, window_s: float) -> tuple[ReleaseLatency, ...]:
    now = time.time()
    return summarise(read_since(log, now - window_s), window_s, until=now)


def _live_words(model: ModelStatus) -> str:
    if model.live_release:
        return f"version {model.live_release.label} is live"
    if model.rollout.phase == "retired":
        return f"retired; `serin rollout start {model.name}:VERSION` serves a version again"
    return "no version is live yet"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _runs(child: Child) -> bool:
    """`serin up` does not wait for the watcher."""
    return child.state == "running" or (child.name == WATCHER and child.state == "starting")


def _is_release(name: str) -> bool:
    try:
        Release.parse(name)
    except NameInvalid:
        return False
    return True
