"""Finds the rollouts that commands and flows mean: this machine's, or those of the hosts that share the store."""

from __future__ import annotations

from pathlib import Path

from serin.errors import StoreNotConditional
from serin.machine import environment
from serin.machine.process_identity import stack_decides
from serin.rollout.cluster.access import StoreRollouts, has_cluster
from serin.rollout.run.access import HomeRollouts, Rollouts
from serin.store.objects import Objects, open_objects


def find_rollouts(home: Path | None = None) -> Rollouts:
    """Returns the rollouts of `home` (None: the environment's) if its stack is up or the store has no cluster, else
    those of the cluster. Raises StoreUnreachable."""
    home = environment.home() if home is None else home
    objects = find_cluster(home)
    return HomeRollouts(home) if objects is None else StoreRollouts(objects)


def find_cluster(home: Path) -> Objects | None:
    """Returns the store in which controllers of several hosts meet; None: this machine's stack decides itself."""
    if stack_decides(home):
        return None
    try:
        objects = open_objects(environment.store_url())
    except StoreNotConditional:
        return None
    return objects if has_cluster(objects) else None
