"""What `serin status` shows on the host of an agent: its own view, which does not need the store."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from serin.cluster.agent.settings import AgentSettings, desired_file, view_file
from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.host_report import AgentReport, ReleaseReport
from serin.host.state import read_stack
from serin.host.supervisor import Child, find_supervisor, process_line, with_problems
from serin.host.wiring import build_gateway
from serin.machine.typed_json import json2value
from serin.store.artifacts import ModelRoute

_STALE_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """`report`: the agent's last one; None: it has not ticked yet. `store_problem`: why it does not use the store."""

    home: Path
    settings: AgentSettings
    gateway_url: str
    gateway_ready: bool
    processes: tuple[Child, ...]
    report: AgentReport | None
    desired: DesiredState | None
    store_problem: str
    supervisor_problem: str = ""

    @property
    def stale(self) -> bool:
        return self.report is None or time.time() - self.report.t > _STALE_S

    @property
    def well(self) -> bool:
        released = self.report.releases.values() if self.report else ()
        ready = all(release.state == "ready" and not release.verified for release in released)
        told = bool(self.report and self.report.problem) or bool(
            self.store_problem or self.supervisor_problem
        )
        told |= any(child.frozen for child in self.processes)
        return self.gateway_ready and not self.stale and ready and not told

    def to_json(self) -> dict[str, Any]:
        return {
            "home": str(self.home),
            "host": self.settings.host,
            "gateway": {"url": self.gateway_url, "ready": self.gateway_ready},
            "peer": self.settings.peer_address,
            "processes": [asdict(child) for child in self.processes],
            "report": asdict(self.report) if self.report else None,
            "desired_seq": self.desired.seq if self.desired else None,
            "store_problem": self.store_problem or None,
            "supervisor": {"problem": self.supervisor_problem or None},
            "well": self.well,
        }

    def lines(self) -> list[str]:
        ready = "ready" if self.gateway_ready else "NOT READY"
        found = [
            f"host     {self.settings.host} (agent in {self.home})",
            f"gateway  {self.gateway_url} {ready}",
        ]
        if self.settings.peer_address:
            secure = "with" if self.settings.peer_files else "WITHOUT"
            found.append(f"peers    reach this host at {self.settings.peer_address}, {secure} TLS")
        if self.store_problem:
            found.append(f"store    NOT USED; serving continues as it is: {self.store_problem}")
        if self.supervisor_problem:
            found.append(f"supervisor {self.supervisor_problem}")
        found += [process_line(child) for child in self.processes if child.problem]
        if self.stale:
            found.append("agent    DOES NOT TICK; see its log in logs/agent.log")
        if self.report and self.report.problem:
            found.append(f"problem  {self.report.problem}")
        found += self._state_lines()
        return found

    def _state_lines(self) -> list[str]:
        if self.desired is None:
            return ["state    none yet: no controller has written what this host runs"]
        in_force = self.report.desired_seq if self.report else 0
        words = "in force" if in_force == self.desired.seq else f"NOT IN FORCE (that is {in_force})"
        found = [f"state    {self.desired.seq} of controller {self.desired.by}, {words}"]
        released = sorted(self.report.releases.items()) if self.report else ()
        found += [f"model    {route.model}: {_shares(route)}" for route in self.desired.routes]
        found += [f"release  {name} {_words(release)}" for name, release in released]
        return found


def read_agent_status(home: Path) -> AgentStatus | None:
    """Returns the status of a home that an agent runs; None for any other home, and for one that is down."""
    stack, settings = read_stack(home), AgentSettings.read(home)
    if stack is None or not stack.is_alive or not stack.agent or settings is None:
        return None
    supervisor, supervisor_problem = find_supervisor(stack)
    children = with_problems(home, supervisor.children(), time.time())
    report, problem = _read_view(home)
    return AgentStatus(
        home=home,
        settings=settings,
        gateway_url=stack.gateway_url,
        gateway_ready=build_gateway(home).ready(),
        processes=children,
        supervisor_problem=supervisor_problem,
        report=report,
        desired=DesiredState.load_file(desired_file(home)),
        store_problem=problem,
    )


def _read_view(home: Path) -> tuple[AgentReport | None, str]:
    try:
        found = json.loads(view_file(home).read_text())
        return json2value(AgentReport, found["report"]), str(found["store_problem"])
    except (OSError, ValueError, TypeError, KeyError):
        return None, ""


def _shares(route: ModelRoute) -> str:
    parts = [
        f"{release.name} {percent:g}%"
        for release, percent in (
            (route.candidate, route.candidate_percent),
            (route.baseline, route.baseline_percent),
        )
        if release
    ]
    rest = 100 - route.candidate_percent - route.baseline_percent
    return ", ".join([f"{route.stable.name} {rest:g}%", *parts] if route.stable else ["no version is live"])


def _words(release: ReleaseReport) -> str:
    if release.verified:
        return f"{release.state}, WRONG GOLDEN ROWS: {release.verified}"
    if release.problem:
        return f"{release.state.upper()}: {release.problem}"
    checked = ", golden rows checked" if release.verified == "" else ""
    return (release.state if release.state == "ready" else release.state.upper()) + checked
