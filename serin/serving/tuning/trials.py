"""The tuner's trials: settings, their measurements, and a copy of the bundle that has them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from serin.formats.bundle import read_manifest, write_manifest
from serin.serving.triton.backends import Place
from serin.serving.tuning.load import LoadResult
from serin.serving.tuning.requests import Mix
from serin.spec.section import shortest
from serin.spec.yaml_file import read_yaml
from serin.store.artifacts import Bundle
from serin.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings as in the section `serving` of a spec."""

    instances: int
    threads: int
    queue_delay: float
    max_batch_rows: int
    device: Place = "cpu"

    def __str__(self) -> str:
        return (
            f"{'a GPU, ' * (self.device == 'gpu')}"
            f"{self.instances} instance{'s' * (self.instances > 1)} x {self.threads} thread{'s' * (self.threads > 1)}, "
            f"{shortest(self.queue_delay)} of delay, {self.max_batch_rows} rows"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """The measurements of one number of clients in a closed loop. `tail_ms`: the limited quantile, such as p99."""

    clients: int
    requests_per_s: float
    p50_ms: float
    tail_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    settings: Settings
    points: tuple[LoadPoint, ...]

    def best(self, limit_ms: float) -> LoadPoint | None:
        """Returns the best point within the limit; None when even one client waits longer."""
        good = [point for point in self.points if point.tail_ms <= limit_ms]
        return max(good, key=lambda point: point.requests_per_s, default=None)

    def requests_per_s(self, limit_ms: float) -> float:
        best = self.best(limit_ms)
        return best.requests_per_s if best else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The result of a tuning. `gain`: requests/s of `chosen` over those of `before`, measured in turns.

    `steady`: an open loop, where latencies count from the time a request was meant to be sent, at the highest rate of
    STEADY that stays below the limit. `passed_over`: the best in the search, if it gave only `passed_over_gain` when
    measured in turns. `devices`: the tried devices with the best settings of each.
    """

    bundle: Bundle
    limit_ms: float
    share: float
    mix: Mix
    before: Trial
    chosen: Trial
    trials: tuple[Trial, ...]
    gain: float
    steady_requests_per_s: float
    steady: LoadResult
    seconds: float
    passed_over: Trial | None = None
    passed_over_gain: float = 1.0
    devices: Mapping[Place, Trial] = field(default_factory=dict)
    gpu_price: float = 1.0

    @property
    def better(self) -> bool:
        return self.chosen.settings != self.before.settings


def copy_with(bundle: Bundle, store: Store, settings: Settings) -> Bundle:
    """Returns a copy of `bundle` in another store, with other `settings`."""
    source = Path(bundle.path)
    manifest = read_manifest(source)
    version = store.reserve_version(bundle.model)
    with store.workspace() as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        path = folder / "spec.yaml"
        spec = dict(read_yaml(path.read_text(encoding="utf-8"))) if path.exists() else {}
        spec["serving"] = {**dict(spec.get("serving") or {}), **as_spec(settings)}
        path.unlink(missing_ok=True)  # copied as read-only
        path.write_text(yaml.safe_dump(spec), encoding="utf-8")
        write_manifest(
            folder,
            name=bundle.model,
            model_version=version,
            spec_digest=manifest.spec_digest,
            lineage=manifest.lineage,
            metrics=manifest.metrics,
        )
        return store.publish_bundle(bundle.model, version, folder)


def as_spec(settings: Settings) -> Mapping[str, int | str]:
    values = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    return {**values, "queue_delay": shortest(settings.queue_delay)}
