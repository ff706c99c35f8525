"""What the quality duty knows of a model's versions: their specs, test results and aliases in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serin.errors import SerinError
from serin.formats.quality import QualityReference, read_quality_reference
from serin.monitoring.quality.objective import Watch
from serin.monitoring.quality.scan import Watched
from serin.pipeline.labels import watched_versions
from serin.spec.load import load_stored_spec
from serin.spec.monitoring import MonitoringSpec
from serin.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One version. `reference`: None when it was exported without `quality.json`. `watch`: None without a quality
    objective."""

    watched: Watched
    reference: QualityReference | None
    monitoring: MonitoringSpec
    watch: Watch | None


class QualityVersions:
    """A version never changes, so each is read once; aliases are read at every look."""

    def __init__(self, store: Store, model: str) -> None:
        self._store, self._model = store, model
        self._read = watched_versions(store, model)
        self._known: dict[int, Known] = {}
        self.aliases: dict[str, int] = {}

    def watched(self, version: int) -> Watched | None:
        return self._read(version)

    def known(self, version: int) -> Known | None:
        """None for a version that is not in the store, or without a spec."""
        if version not in self._known:
            found = self._find(version)
            if found is None:
                return None
            self._known[version] = found
        return self._known[version]

    def look_again(self) -> None:
        """Reads the aliases."""
        self.aliases = dict(self._store.aliases(self._model))

    @property
    def served(self) -> list[int]:
        """The versions that answer requests, or did before the last rollout."""
        return sorted(set(self.aliases.values()))

    def days(self) -> float:
        """How long the live version keeps its records, else the newest."""
        versions = self._store.versions(self._model)
        version = self.aliases.get("live") or (versions[-1] if versions else None)
        known = None if version is None else self.known(version)
        return (known.monitoring if known else MonitoringSpec()).capture.days

    def _find(self, version: int) -> Known | None:
        watched = self._read(version)
        if watched is None:
            return None
        try:
            bundle = Path(self._store.bundle(self._model, version).path)
            reference = read_quality_reference(bundle)
            monitoring = load_stored_spec(bundle / "spec.yaml").monitoring
        except (SerinError, OSError):
            return None
        quality = monitoring.quality
        watch = None if reference is None or quality is None else Watch(reference=reference, spec=quality)
        return Known(watched=watched, reference=reference, monitoring=monitoring, watch=watch)
