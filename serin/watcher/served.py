"""Which versions of which models are served from a home: by its own rollouts, or by the desired state that its agent
follows. Needs no store."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from serin.errors import FileBroken
from serin.formats.cluster.desired_state import DesiredState
from serin.host.state import read_stack
from serin.machine.documents import warn_once
from serin.rollout.run.status import status

log = logging.getLogger(__name__)

_agents: dict[Path, bool] = {}  # by home, as it was last known


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model. `versions`: those that answer clients; `live`: the one that takes the traffic; None: none yet."""

    name: str
    live: int | None
    versions: frozenset[int]


def has_agent(home: Path) -> bool:
    """Whether an agent runs in this home, or did last: a controller elsewhere decides what is served."""
    try:
        stack = read_stack(home)
    except FileBroken as error:
        warn_once(log, error)
    else:
        _agents[home] = stack is not None and stack.agent
    return _agents.get(home, False)


def served_models(home: Path) -> list[Served]:
    """The models that are served, by name."""
    if has_agent(home):
        return _by_agent(home)
    return [
        Served(
            name=model.name,
            live=model.live,
            versions=frozenset(each.version for each in model.releases if each.arm != "baseline"),
        )
        for model in status(home)
    ]


def _by_agent(home: Path) -> list[Served]:
    try:
        desired = DesiredState.load((home / "agent" / "desired.json").read_bytes())
    except (OSError, ValueError, TypeError, KeyError):
        return []  # no controller has decided yet
    found = []
    for route in sorted(desired.routes, key=lambda route: route.model):
        versions = frozenset(each.version for each in (route.stable, route.candidate) if each is not None)
        live = route.stable.version if route.stable else None
        found.append(Served(name=route.model, live=live, versions=versions))
    return found
