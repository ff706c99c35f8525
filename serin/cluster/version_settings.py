"""What the spec of a version says about serving it: timeouts, schema, replicas. A version never changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from serin.errors import NotFound, RolloutRefused
from serin.formats.bundle import REPOSITORY
from serin.formats.cluster.host_report import AgentReport
from serin.formats.cluster.replicas import HOSTS_WITH_AGENTS, ONE_MACHINE, no_autoscaler
from serin.formats.policy import check_policy
from serin.formats.schema import Schema, read_schema
from serin.formats.windows import WindowPlan, read_windows
from serin.machine.ports import is_loopback
from serin.serving.envoy.routes import Timeouts
from serin.serving.external import External
from serin.serving.triton.repository import serving_settings, wanted_replicas
from serin.spec.serving import ReplicaRange
from serin.spec.stored import stored_capture, stored_objectives, stored_section
from serin.store.artifacts import Release
from serin.store.published import SERVER
from serin.store.store import Store
from serin.store.trust import find_trusted


def stored_timeouts(store: Store) -> Callable[[Release], Timeouts]:
    """Returns timeouts by the spec of a version, which never changes."""

    @functools.cache
    def timeouts(release: Release) -> Timeouts:
        bundle = store.bundle(release.model, release.label)
        folder = Path(bundle.path)
        found = Timeouts.from_spec(serving_settings(bundle), stored_objectives(folder))
        share = stored_capture(folder, ["share"]).share
        plan = read_windows(folder)
        windows = None if plan is None else plan.to_json()
        found = replace(found, shares={release.name: share} if share else {}, windows=windows)
        elsewhere = (folder / SERVER).is_file()
        if elsewhere and not stored_section(folder, "objectives"):
            found = replace(found, promised_s=None)
        own = elsewhere or (folder / REPOSITORY).is_dir()  # it checks its own strings
        return replace(found, max_text_bytes=None) if own else found

    return timeouts


def model_timeouts(timeouts: Callable[[Release], Timeouts], releases: Sequence[Release]) -> Timeouts:
    """Returns the timeouts of the first release, with the recorded shares of them all."""
    shares: dict[str, float] = {}
    for release in releases:
        with suppress(NotFound):  # it still runs, and is no longer in the store
            shares |= timeouts(release).shares
    return replace(timeouts(releases[0]), shares=shares)


def stored_schema(store: Store) -> Callable[[Release], Schema]:
    """Returns the schemas of versions in the store."""
    return lambda release: read_schema(Path(store.bundle(release.model, release.label).path))


def stored_windows(store: Store) -> Callable[[Release], WindowPlan | None]:
    """Returns the online windows of versions in the store; None for one without."""
    return lambda release: read_windows(Path(store.bundle(release.model, release.label).path))


def check_trusted(store: Store, external: External | None = None) -> Callable[[Release], None]:
    """The check raises BundleUntrusted when signatures are required and no trusted key has signed the version, and
    PolicyRefused when the store's policy refuses it. A server elsewhere must answer, unless the model is Serin's: then
    its traffic does not leave without a signature."""

    def check(release: Release) -> None:
        if external is not None and external.has(release):
            external.check_answers(release)
            every = (Release(model=release.model, version=number) for number in store.versions(release.model))
            if all(map(external.has, every)):
                return  # what it runs is not known here
        check_policy(store, find_trusted(store, release.model, release.label))

    return check


def check_windows(
    store: Store, reports: Callable[[], Mapping[str, AgentReport]]
) -> Callable[[Release], None]:
    """The check raises RolloutRefused for a version with online windows where hosts do not share the events that they
    count. `reports`: of all hosts with a gateway."""

    def check(release: Release) -> None:
        if read_windows(Path(store.bundle(release.model, release.version).path)) is None:
            return
        places = {report.events for report in reports().values()}
        without = sorted(host for host, report in reports().items() if report.events is None)
        if without:
            reason = f"{', '.join(without)} share no events with other hosts; set SERIN_EVENTS there to their Valkey"
        elif len(places) > 1:
            reason = f"hosts keep events in different places ({', '.join(sorted(map(str, places)))})"
        elif len(reports()) > 1 and is_loopback(urlsplit(next(iter(places)) or "").hostname or ""):
            reason = "SERIN_EVENTS names the loopback interface, which other hosts do not share"
        else:
            return
        raise RolloutRefused(
            model=release.model,
            command="start",
            reason=f"it has windows with source: online, and {reason} (docs/how-to/online-windows.md)",
        )

    return check


def check_replicas(store: Store, *, shared: bool) -> Callable[[Release], None]:
    """The check raises RolloutRefused for a version that asks for an autoscaler where there is none. `shared`: agents
    of several hosts run releases, not one machine."""

    def check(release: Release) -> None:
        wanted = wanted_replicas(store.bundle(release.model, release.label))
        if isinstance(wanted, ReplicaRange):
            place = HOSTS_WITH_AGENTS if shared else ONE_MACHINE
            raise RolloutRefused(
                model=release.model,
                command="start",
                reason=f"serving.replicas: {wanted}: {no_autoscaler(place)}",
            )

    return check


def stored_replicas(store: Store) -> Callable[[Release], int | None]:
    """Returns on how many hosts a version runs; None: on all."""

    @functools.cache
    def replicas(release: Release) -> int | None:
        wanted = wanted_replicas(store.bundle(release.model, release.label))
        # check_replicas refuses a rollout of a range.
        return wanted.min if isinstance(wanted, ReplicaRange) else wanted

    return replicas
