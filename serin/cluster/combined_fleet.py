"""Presents releases that run here and servers that run elsewhere as one fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from serin.errors import RequestsDiffer, RolloutRefused
from serin.formats.schema import Schema, difference
from serin.formats.windows import WindowPlan
from serin.rollout.run.ports import Processes
from serin.serving.external import External
from serin.store.artifacts import Endpoint, Release

if TYPE_CHECKING:
    from serin.rollout.decide.advance import ReleaseState

SchemaOf = Callable[[Release], Schema]
WindowsOf = Callable[[Release], WindowPlan | None]


def check_same_requests(release: Release, stable: Release, schema_of: SchemaOf) -> None:
    """Raise RequestsDiffer when no client could send what both versions ask for."""
    if reason := difference(schema_of(stable), schema_of(release)):
        raise RequestsDiffer(release=release.name, stable=stable.name, reason=reason)


def check_same_windows(release: Release, stable: Release, windows_of: WindowsOf) -> None:
    """Raise RolloutRefused when the versions need other online windows: the gateway computes those of one version for
    all requests of the model."""
    before, after = windows_of(stable), windows_of(release)
    if _computed(before) != _computed(after):
        raise RolloutRefused(
            model=release.model,
            command="start",
            reason=f"its windows with source: online are not those of {stable.name}; backfill its events, then retire "
            "the model and start this version (docs/how-to/online-windows.md)",
        )


def _computed(plan: WindowPlan | None) -> WindowPlan | None:
    """The plan without what changes no number: the order of the spec, and what happens without events."""
    if plan is None:
        return None
    inputs = tuple(sorted(plan.inputs, key=lambda column: column.name))
    windows = tuple(sorted(plan.windows, key=lambda window: sorted(window.columns)))
    return replace(
        plan, unavailable="refuse", inputs=inputs, dropped=tuple(sorted(plan.dropped)), windows=windows
    )


class CombinedFleet:
    """A fleet of both kinds. A version that is served elsewhere is only called; every other one is started and stopped
    here."""

    def __init__(
        self,
        ours: Processes,
        external: External,
        schema_of: SchemaOf,
        windows_of: WindowsOf = lambda _: None,
    ) -> None:
        self._ours, self._external = ours, external
        self._schema_of, self._windows_of = schema_of, windows_of

    def start(self, release: Release) -> None:
        if not self._external.has(release):
            self._ours.start(release)
        elif release.baseline:
            reason = (
                "a server that runs elsewhere cannot be started a second time; leave rollout.baseline out"
            )
            raise RolloutRefused(model=release.model, command="start", reason=reason)

    def stop(self, release: Release) -> None:
        if not self._external.has(release):
            self._ours.stop(release)

    def state(self, release: Release) -> ReleaseState:
        if not self._external.has(release):
            return self._ours.state(release)
        return "absent" if release.baseline else self._external.state(release)

    def instance(self, release: Release) -> int | None:
        return None if self._external.has(release) else self._ours.instance(release)

    def endpoint(self, release: Release) -> Endpoint:
        elsewhere = self._external.has(release)
        return self._external.endpoint(release) if elsewhere else self._ours.endpoint(release)

    def verify(self, release: Release) -> None:
        (self._external if self._external.has(release) else self._ours).verify(release)

    def check_fits(self, release: Release, stable: Release, *, share: bool) -> None:
        """Checks servers that run elsewhere, and versions in the store that will share clients. A plan with the single
        step 100 changes inputs on purpose, and still no online windows."""
        check_same_windows(release, stable, self._windows_of)
        elsewhere = {self._external.has(release), self._external.has(stable)}
        if elsewhere == {True}:
            self._external.check_fits(release, stable)
        elif elsewhere == {False} and share:
            check_same_requests(release, stable, self._schema_of)

    def running(self) -> Sequence[Release]:
        return self._ours.running()
