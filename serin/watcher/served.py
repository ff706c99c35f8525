"""Which versions of which models are served from a home: by its own rollouts, or by those of the hosts that share a
store. What needs no store then is the desired state that the agent follows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from serin.errors import FileBroken
from serin.formats.cluster.desired_state import DesiredState
from serin.host.state import read_stack
from serin.machine import environment
from serin.machine.documents import warn_once
from serin.monitoring.capture.counters import models_captured
from serin.monitoring.capture.read import Sources, records_in
from serin.rollout.run.access import Rollouts, home_rollouts
from serin.rollout.run.status import ModelStatus, status, statuses
from serin.store.open import StoreProbe, open_objects

log = logging.getLogger(__name__)

_STORE_S: Final = 2.0  # all duties wait with the one that asks
_agents: dict[Path, bool] = {}  # by home, as it was last known
_shared: dict[str, Rollouts] = {}  # by URL: decisions are read once
_seen: dict[Path, list[ModelStatus]] = {}  # by home
_led: dict[Path, Led] = {}  # by home, while this process leads the watchers of several hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model. `versions`: those that answer clients; `live`: the one that takes the traffic; None: none yet."""

    name: str
    live: int | None
    versions: frozenset[int]
    live_edition: int = 1  # of the live version's lookups


def has_agent(home: Path) -> bool:
    """Whether an agent runs in this home, or did last: a controller elsewhere decides what is served."""
    try:
        stack = read_stack(home)
    except FileBroken as error:
        warn_once(log, error)
    else:
        _agents[home] = stack is not None and stack.agent
    return _agents.get(home, False)


class FollowedRecords:
    """The records of all hosts that the leading watcher follows, by model: copies on its host. They change only while
    they are taken away from those who read them."""

    def __init__(self) -> None:
        self._lock, self._sources = threading.Lock(), dict[str, Sources]()

    @property
    def models(self) -> list[str]:
        return list(self._sources)

    @contextmanager
    def read(self, model: str) -> Iterator[Sources | None]:
        with self._lock:
            yield self._sources.get(model)

    def take_away(self, model: str) -> None:
        with self._lock:
            self._sources.pop(model, None)

    def give(self, model: str, sources: Sources) -> None:
        with self._lock:
            self._sources[model] = sources


class Led(Protocol):
    """What the leading watcher of several hosts has. `state`: the home with what it knows."""

    state: Path
    records: FollowedRecords

    def keep(self) -> None:
        """Has the store keep all that it knows. Raises LeadershipLost or StoreUnreachable."""
        ...


def lead(home: Path, led: Led | None) -> None:
    """Notes that this process leads the watchers of several hosts; None: it does not any more."""
    if led is None:
        _led.pop(home, None)
    else:
        _led[home] = led


def led_by(home: Path) -> Led | None:
    return _led.get(home)


def state_home(home: Path) -> Path | None:
    """The home with what this watcher knows of models; None: the watcher of another host leads."""
    led = led_by(home)
    return led.state if led else None if has_agent(home) else home


@contextmanager
def followed_records(home: Path, model: str) -> Iterator[Sources | None]:
    """A block in which the records of a model can be followed: those of this home, or, if this watcher leads, of all
    hosts. None: they are not here now."""
    if led := led_by(home):
        with led.records.read(model) as sources:
            yield sources
    else:
        yield None if has_agent(home) else records_in(home)


def followed_models(home: Path) -> list[str]:
    """The models with records that can be followed."""
    led = led_by(home)
    return led.records.models if led else [] if has_agent(home) else models_captured(home)


def watched_rollouts(home: Path) -> Rollouts:
    """The rollouts that decide what is served from this home. Raises StoreUnreachable when they are in a store that
    does not answer."""
    if not has_agent(home):
        return home_rollouts(home)
    url = environment.store_url()
    StoreProbe(url).check(_STORE_S)
    if url not in _shared:
        _shared[url] = Rollouts(open_objects(url))
    return _shared[url]


def watched_statuses(home: Path) -> list[ModelStatus]:
    """One entry for each model that ever had a rollout, by name. Raises StoreUnreachable."""
    found = _seen[home] = statuses(watched_rollouts(home))
    return found


def last_statuses(home: Path) -> list[ModelStatus]:
    """The same as a duty of this process saw it last, where a store would have to be asked."""
    return _seen.get(home, []) if has_agent(home) else statuses(home_rollouts(home))


def served_models(home: Path) -> list[Served]:
    """The models that are served, by name."""
    if has_agent(home):
        return _by_agent(home)
    return [
        Served(
            name=model.name,
            live=model.live,
            live_edition=model.live_edition,
            versions=frozenset(each.version for each in model.releases if each.arm != "baseline"),
        )
        for model in status(home)
    ]


def _by_agent(home: Path) -> list[Served]:
    desired = DesiredState.load_file(home / "agent" / "desired.json")  # None: no controller has decided yet
    return [
        Served(
            name=route.model,
            live=route.stable.version if route.stable else None,
            live_edition=route.stable.edition if route.stable else 1,
            versions=frozenset(each.version for each in (route.stable, route.candidate) if each is not None),
        )
        for route in sorted(desired.routes if desired else (), key=lambda route: route.model)
    ]
