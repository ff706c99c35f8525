"""Refreshes the lookups of a live model: reads their tables again, publishes an edition, and switches to it.

The version stays as it is: nothing is trained. An edition is published whole or not at all, and the controller switches
to it as it does to a version, so this process may end at any point: the next call finds what is there and resumes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serin.errors import LookupRefused, NotFound
from serin.formats.bundle import GOLDEN, check_has_graph, read_manifest, verify_bundle
from serin.formats.lookups import Lookups, read_lookups
from serin.formats.schema import read_schema
from serin.formats.trained import file_sha256
from serin.machine import environment
from serin.machine.locks import locked
from serin.pipeline.roll_out import OnDecision, follow_rollout, rollout_outcome, submit_rollout
from serin.pipeline.stage import StageResult
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase
from serin.rollout.run.access import find_rollouts
from serin.rollout.run.status import status_of
from serin.spec.pipeline import PipelineSpec
from serin.spec.relation import LookupSpec
from serin.spec.stored import stored_section
from serin.store.artifacts import Bundle, Release
from serin.store.packages import stored_spec
from serin.store.store import Store
from serin.store.trust import find_trusted
from serin.store.waits import importing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupAge:
    """A table of a release's lookups. `read`: seconds since 1970. `max_age_s`: None: it may be of any age."""

    table: str
    rows: int
    read: float
    max_age_s: float | None

    def is_too_old(self, now: float) -> bool:
        return self.max_age_s is not None and now - self.read > self.max_age_s


def refresh_lookups(
    model: str,
    *,
    max_row_change: float | None = None,
    canary: bool = False,
    again: bool = True,
    by: str | None = None,
    why: str = "",
    on_decision: OnDecision = lambda _: None,
    follow: bool = True,
    stop: threading.Event | None = None,
) -> StageResult[Release]:
    """The release that is live then: an edition with the tables as they are now, or the one that was live when they
    have not changed.

    `max_row_change`: instead of the spec's. `canary`: the edition gets traffic by the steps of the spec; by default all
    of it at once, when its golden rows are answered. `again`: also an edition that was rolled back, when the tables are
    still those of it. `follow`: waits until it is live. LookupRefused, CheckFailed and
    GateFailed: nothing was published, and what is live stays.
    """
    store = Store.open()
    live = live_release(store, model)
    base = find_trusted(store, model, live.version)
    edition = find_or_publish(store, base, live, max_row_change=max_row_change)
    if edition.release == live:
        return StageResult(value=live, ran=False, why=f"the tables of {live.name} have not changed")
    if not again and _was_rolled_back(edition.release, live):
        name = edition.release.name
        why = f"{name} has these tables and was rolled back; `serin lookups refresh {model}` tries it again"
        return StageResult(value=live, ran=False, why=why)
    if (now := live_release(store, model)) != live:
        raise LookupRefused(table=model, reason=f"{now.name} has become live in the meantime; refresh again")
    spec = stored_spec(Path(base.path))
    plan = Plan.from_spec(spec.rollout, spec.serving, spec.objectives)
    reason = why or f"the lookups of {live.name} are refreshed"
    running = submit_rollout(
        find_rollouts(),
        edition.release,
        plan if canary else plan.at_once(),
        by=by or environment.actor(),
        why=lambda: reason,
    )
    if running is None or not follow:
        return StageResult(value=edition.release, ran=True, why=reason)
    decisions = follow_rollout(edition.release, running, on_decision=on_decision, stop=stop)
    return StageResult(value=rollout_outcome(edition.release, decisions), ran=True, why=decisions[-1].reason)


def _was_rolled_back(edition: Release, live: Release) -> bool:
    """Whether an edition newer than the live one had been live before it, or its rollout was the last and failed."""
    status = status_of(find_rollouts(), live.model)
    if status is None or edition.edition < live.edition:
        return False
    last = status.rollout
    failed = (last.version, last.edition, last.phase) == (edition.version, edition.edition, Phase.ROLLED_BACK)
    return failed or edition == status.previous_release


def live_release(store: Store, model: str) -> Release:
    """The release of a model that is live. NotFound when none is."""
    status = status_of(find_rollouts(), model)
    live = status.live_release if status is not None else store.aliased(model).get("live")
    if live is None:
        models = store.models()
        raise NotFound(kind="live version of model", name=model, known=() if model in models else models)
    return live


def lookup_ages(store: Store, release: Release) -> list[LookupAge]:
    """The tables of a release's lookups, with the time when each was read last; none for a version without lookups."""
    folder = Path(store.bundle(release.model, release.label).path)
    known = read_lookups(folder)
    if known is None:
        return []
    read = max(known.read, store.lookups_read(release) or 0.0)
    joins = stored_section(folder, "data").get("joins") or ()
    limits = {join["with"]: _stored_lookup(join).max_age for join in joins}
    return [
        LookupAge(table=table.name, rows=known.rows[table.name], read=read, max_age_s=limits.get(table.name))
        for table in known.tables
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EditionTable:
    """A table of one edition. `live`: whether its release is. `too_old`: as `max_age` of the spec says."""

    release: Release
    live: bool
    age: LookupAge
    too_old: bool


def edition_tables(store: Store, live: Release, now: float) -> list[EditionTable]:
    """The tables of all editions of the live version, the oldest edition first; none without lookups."""
    editions = (replace(live, edition=each) for each in store.editions(live.model, live.version))
    return [
        EditionTable(release=release, live=release == live, age=age, too_old=age.is_too_old(now))
        for release in editions
        for age in lookup_ages(store, release)
    ]


def _stored_lookup(join: Mapping[str, Any]) -> LookupSpec:
    return LookupSpec.model_validate(join.get("lookup") or {})


def is_due(store: Store, release: Release, now: float) -> bool:
    """Whether a scheduled refresh reads the tables of a release again: one of them has reached half of its age."""
    return any(
        each.max_age_s is not None and now - each.read >= each.max_age_s / 2
        for each in lookup_ages(store, release)
    )


def _refreshable(base: Bundle) -> tuple[PipelineSpec, Lookups]:
    folder = Path(base.path)
    check_has_graph(read_manifest(folder), "a refresh of lookups")
    known = read_lookups(folder)
    if known is not None:
        return stored_spec(folder), known
    reason = f"version {base.version} has no lookups that can be refreshed: its spec has no join with source: lookup"
    raise LookupRefused(table=base.model, reason=reason)


def find_or_publish(
    store: Store, base: Bundle, live: Release, *, max_row_change: float | None = None
) -> Bundle:
    """The edition of the version in `base` with the tables as they are now: the live one, one that an earlier call
    published, or a new one. It is not rolled out."""
    spec, known = _refreshable(base)
    lock = store.lock(f"lookups/{base.model}")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock):
        return _find_or_publish(store, base, spec, known, live, max_row_change)


def _find_or_publish(
    store: Store,
    base: Bundle,
    spec: PipelineSpec,
    known: Lookups,
    live: Release,
    max_row_change: float | None,
) -> Bundle:
    with importing("imports of ONNX for a refresh"):
        from serin.etl.lookups import check_row_changes, golden_again, read_tables_again
        from serin.export.edition import publish_edition, read_plan

    folder = Path(base.path)
    verify_bundle(folder, digest=base.digest)
    with store.workspace() as work:
        logger.info(f"reading {', '.join(table.name for table in known.tables)}")
        lookups, tables = read_tables_again(spec.data, known, folder, work)
        digests = {table.name: file_sha256(work / table.file) for table in lookups.tables}
        if (same := _same_edition(store, base, live, digests)) is not None:
            store.note_lookups_read(same, lookups.read)
            return store.bundle(base.model, same.label, hold=True)
        before = read_lookups(Path(store.bundle(live.model, live.label).path)) or known
        check_row_changes(tables, before.rows, max_row_change=max_row_change)
        golden = golden_again(folder / GOLDEN, read_schema(folder).inputs, read_plan(folder), lookups, tables)
        del tables  # the graph is built beside what is left, from their files
        number = store.reserve_edition(base.model, base.version)
        logger.info(f"building edition {number} of {base.release.name}")
        bundle = publish_edition(store, base, number, lookups=lookups, tables=work, golden=golden)
    logger.info(f"published {bundle.release.name}")
    return bundle


def _same_edition(store: Store, base: Bundle, live: Release, digests: Mapping[str, str]) -> Release | None:
    """The edition whose tables have these digests: the live one if it does, else the newest."""
    editions = (replace(live, edition=each) for each in reversed(store.editions(base.model, base.version)))
    for release in (live, *editions):
        folder = Path(store.bundle(release.model, release.label).path)
        if (lookups := read_lookups(folder)) is None:
            continue
        files = read_manifest(folder).files
        if {table.name: files[table.file].sha256 for table in lookups.tables} == digests:
            return release
    return None
