"""Servers that Serin does not run, as versions in a store."""

from pathlib import Path

from serin.pipeline.elsewhere import Elsewhere
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store


def register(
    store: Store,
    model: str,
    place: Endpoint,
    *,
    spec: Path | None = None,
    timeout_s: float | None = None,
    reference: Path | None = None,
) -> Release:
    """As `serin rollout start --stable URL --candidate URL` does for each of the two."""
    return Elsewhere(store, model, spec=spec, timeout_s=timeout_s, reference=reference).register(place)
