"""Copies a version from store to store: the same bytes under the same number, so that its signatures stay valid.

Nothing of it is run here. A release of it answers its golden rows on the hosts that serve it before it gets traffic.
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import Final

from serin.errors import BundleBroken, CommandRefused, RolloutRefused, VersionTaken
from serin.formats.bundle import MANIFEST, Manifest, check_has_graph, read_manifest
from serin.formats.policy import check_policy
from serin.machine import environment
from serin.pipeline.roll_out import stored_plan, submit_rollout
from serin.pipeline.stage import StageResult
from serin.rollout.run.access import Rollouts, rollouts_at
from serin.store.artifacts import Bundle, Release
from serin.store.origin import Origin, Stop, read_origin, write_origin
from serin.store.store import Store
from serin.store.trust import Trust, add_signatures, signatures_of

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1 << 20


def copy_version(source: Store, target: Store, name: str) -> StageResult[Bundle]:
    """Copies MODEL[:VERSION] with its lineage and signatures; returns it as it is in `target`.

    Raises PolicyRefused or BundleUntrusted before anything is copied, BundleBroken for a byte that was changed in the
    source or on the way, and VersionTaken when the number belongs to another version there. Then, and when it is
    interrupted, nothing is visible in `target`. Copying again gives the same version, with the signatures that were
    added in the meantime.
    """
    found = source.release(name)
    model, version = found.model, found.version
    if found.edition > 1:
        reason = (
            f"{found.name} is an edition of its lookups, which are refreshed where they are served: copy "
            f"{model}:{version}, and run `serin lookups refresh {model}` there"
        )
        raise CommandRefused(model=model, command="copy", reason=reason)
    bundle = source.bundle(model, version, hold=True)
    manifest = read_manifest(Path(bundle.path))
    check_has_graph(manifest, "a copy")
    Trust.open().check(source, bundle)
    check_policy(target, bundle, of=source)
    there = target.manifest_digest(model, version)
    if there == bundle.digest:
        _copy_signatures(source, target, bundle)
        return StageResult(value=target.bundle(model, version), ran=False, why="it is there already")
    if there is not None:
        raise VersionTaken(release=found.name, url=target.url, other=f"digest {there[:12]}")
    logger.info("copying %s (%d files)", found.name, len(manifest.files))
    with target.workspace() as work:
        _copy_files(Path(bundle.path), work, manifest, bundle.digest)
        if not target.claim_version(model, version, bundle.digest):
            raise VersionTaken(release=found.name, url=target.url, other="it was given out there")
        _copy_signatures(source, target, bundle)
        _write_origin(source, target, bundle)
        copied = target.publish_bundle(model, version, work, copied=True)
    return StageResult(value=copied, ran=True, why=f"copied from {source.url}")


def _copy_files(folder: Path, work: Path, manifest: Manifest, digest: str) -> None:
    """Copies the files of the manifest, and compares each with its digest while it is read. `digest`: of the manifest
    whose signature was checked."""
    for relative, entry in manifest.files.items():
        target = work / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        found, size = hashlib.sha256(), 0
        try:
            with (folder / relative).open("rb") as stream, target.open("wb") as out:
                while size <= entry.size and (chunk := stream.read(_CHUNK_BYTES)):  # the rest is not read
                    found.update(chunk)
                    size += out.write(chunk)
        except FileNotFoundError as error:
            raise BundleBroken(path=str(folder), reason=f"{relative} is missing") from error
        if (size, found.hexdigest()) != (entry.size, entry.sha256):
            raise BundleBroken(path=str(folder), reason=f"{relative} was changed after it was sealed")
    content = (folder / MANIFEST).read_bytes()
    if {hashlib.sha256(content).hexdigest(), manifest.digest} != {digest}:
        raise BundleBroken(path=str(folder), reason="its manifest was changed while it was copied")
    (work / MANIFEST).write_bytes(content)


def _copy_signatures(source: Store, target: Store, bundle: Bundle) -> None:
    """Adds those that the target does not have: a source replaces no signature there."""
    known = {each.key for each in signatures_of(target, bundle) or ()}
    new = tuple(each for each in signatures_of(source, bundle) or () if each.key not in known)
    if new:
        add_signatures(target, bundle.model, bundle.version, new)


def _write_origin(source: Store, target: Store, bundle: Bundle) -> None:
    before = read_origin(source, bundle.model, bundle.version)
    now = Stop(store=source.url, by=environment.user(), host=environment.host(), at=time.time())
    origin = Origin(manifest=bundle.digest, stores=(*before, now))
    write_origin(target, bundle.model, bundle.version, origin)


def find_target_rollouts(target: Store, name: str) -> Rollouts:
    """Returns the rollouts of those who serve from a store. Raises RolloutRefused when this machine cannot reach
    them."""
    found = rollouts_at(target.url)
    if found is None:
        reason = (
            f"no controller that serves from {target.url} can be reached from here; copy without --rollout, and run "
            f"`serin rollout start {name}` on the machine that serves"
        )
        raise RolloutRefused(model=name.partition(":")[0], command="start", reason=reason)
    return found


def start_copied(rollouts: Rollouts, bundle: Bundle, *, why: str) -> str | None:
    """Starts the rollout of a copied version by its own plan; returns its id. None: the version is live already."""
    release, by = Release(model=bundle.model, version=bundle.version), environment.actor()
    return submit_rollout(rollouts, release, stored_plan(bundle), by=by, why=lambda: why)
