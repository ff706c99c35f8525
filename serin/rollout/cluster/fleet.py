"""The fleet of a leading controller: processes that other machines run, changed only while this one leads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from serin.errors import RequestsDiffer
from serin.formats.schema import Schema, difference
from serin.rollout.cluster.leadership import Leadership
from serin.rollout.decide.advance import ReleaseState
from serin.rollout.run.ports import Processes, Versions
from serin.store.artifacts import Endpoint, Release


class ClusterFleet:
    """The port `Fleet` over any processes: agents (agents.py), or another scheduler's."""

    def __init__(
        self,
        processes: Processes,
        leadership: Leadership,
        term: int,
        schema_of: Callable[[Release], Schema] | None = None,
    ) -> None:
        self._processes, self._leadership, self._term = processes, leadership, term
        self._schema_of = schema_of

    def start(self, release: Release) -> None:
        self._leadership.check(self._term)
        self._processes.start(release)

    def stop(self, release: Release) -> None:
        self._leadership.check(self._term)
        self._processes.stop(release)

    def state(self, release: Release) -> ReleaseState:
        return self._processes.state(release)

    def instance(self, release: Release) -> int | None:
        return self._processes.instance(release)

    def endpoint(self, release: Release) -> Endpoint:
        return self._processes.endpoint(release)

    def verify(self, release: Release) -> None:
        self._processes.verify(release)

    def running(self) -> Sequence[Release]:
        return self._processes.running()

    def check_fits(self, release: Release, stable: Release, *, share: bool) -> None:
        """Checks that versions which will share clients take the same requests."""
        if share and self._schema_of is not None:
            reason = difference(self._schema_of(stable), self._schema_of(release))
            if reason:
                raise RequestsDiffer(release=release.name, stable=stable.name, reason=reason)


class SharedVersions(Versions, Protocol):
    def set_alias(
        self, model: str, alias: str, version: int | None, *, check: Callable[[], None] | None = None
    ) -> None:
        """`check` is called after the aliases are read, and what it allows is written only if nobody changed them."""


class ClusterVersions:
    """The store's versions and aliases. An alias is moved only while this controller leads: if it is frozen in the
    middle, what another leader wrote stays."""

    def __init__(self, versions: SharedVersions, leadership: Leadership, term: int) -> None:
        self._versions, self._leadership, self._term = versions, leadership, term

    def versions(self, model: str) -> Sequence[int]:
        return self._versions.versions(model)

    def aliases(self, model: str) -> Mapping[str, int]:
        return self._versions.aliases(model)

    def set_alias(self, model: str, alias: str, version: int | None) -> None:
        self._versions.set_alias(model, alias, version, check=lambda: self._leadership.check(self._term))
