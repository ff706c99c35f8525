"""Finds how to serve a model on this machine: the most requests/s that keep the promised latency.

Every setting is measured on a separate Triton, from a copy of the bundle; the live release is not touched. One value is
changed at a time, from the settings in use. At the end the best settings and those in use are measured again, in turns:
a gain that does not show there does not count. A bundle that was exported for a GPU is also tuned on the CPU, or the
other way round, and the device with more requests/s for its price is chosen.
"""

from __future__ import annotations

import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from serin.errors import BackendRefused, GpuMemoryShort, ReleaseNotReady, TuningFailed
from serin.evidence.histogram import latency_name
from serin.formats.bundle import GOLDEN, REPOSITORY, check_has_graph, read_manifest
from serin.formats.gate import read_runtime
from serin.machine.hardware import core_count, inventory
from serin.serving.children import Children
from serin.serving.triton.backends import Place, Server
from serin.serving.triton.installation import find_triton
from serin.serving.triton.releases import Releases
from serin.serving.triton.repository import choose_for, serving_settings
from serin.serving.tuning.load import Closed, LoadResult, Open, run_load
from serin.serving.tuning.load_connections import Target
from serin.serving.tuning.requests import ONE_ROW, Mix, mixed_target
from serin.serving.tuning.trials import LoadPoint, Settings, Trial, Tuning, copy_with
from serin.spec.stored import stored_section
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store

logger = logging.getLogger(__name__)

CLIENTS = (1, 2, 4, 8, 16, 32, 64)
DELAYS_S = (100e-6, 500e-6, 2e-3)
NEAR = 2  # positions in CLIENTS below the best so far
WORTH_IT = 1.03  # a smaller gain is noise
ROUNDS = 5
STEADY = (0.8, 0.6, 0.4, 0.2)

_START_S = 90.0
_FALLEN = 0.9  # of the best requests/s
_WARM_UP_S = 0.2
_ENOUGH = 30  # requests that make a lap meaningful


@dataclass(slots=True)
class Tuner:
    """Tunes a bundle. `gpu_price`: the price of a GPU with its cores over that of the cores alone.

    A GPU must give that many times the requests/s. A device that cannot keep the limit is never chosen, unless the
    other cannot either.
    """

    bundle: Bundle
    limit_ms: float
    share: float = 0.99  # of requests that must be answered within the limit
    mix: Mix = field(default_factory=lambda: ONE_ROW)
    gpu_price: float = 1.0
    largest_request_rows: int | None = None  # None: as large as the bundle allows
    budget_s: float = 240.0
    most_trials: int | None = None
    lap_s: float = 1.0
    _trials: dict[Settings, Trial] = field(default_factory=dict)
    _devices: dict[Place, Trial] = field(default_factory=dict)
    _scratch: Path = Path()

    def run(self) -> Tuning:
        source = Path(self.bundle.path)
        check_has_graph(read_manifest(source), "tune")
        if (source / REPOSITORY).is_dir() or not (source / GOLDEN).is_file():
            reason = (
                "it is a team's own repository, whose config.pbtxt decides, or has no golden rows to send"
            )
            raise TuningFailed(model=self.bundle.model, reason=reason)
        most = serving_settings(self.bundle).max_batch_rows
        if max(self.mix) > most:
            reason = (
                f"requests of {max(self.mix)} rows are more than its serving.max_batch_rows={most}; raise it"
            )
            raise TuningFailed(model=self.bundle.model, reason=reason)
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="serin-tune-") as scratch:
            self._scratch = Path(scratch)
            before = self._try(self.in_use())
            if not before.points:
                raise TuningFailed(model=self.bundle.model, reason="no request was answered")
            best = self._search(before, begin + 0.7 * self.budget_s)
            gain = 1.0 if best is before else self._in_turns(before, best)
            worth = gain * self._price(before) >= WORTH_IT * self._price(best)
            chosen = best if worth else before
            rate, steady = self._steady(chosen)
        return Tuning(
            bundle=self.bundle,
            limit_ms=self.limit_ms,
            share=self.share,
            mix=self.mix,
            before=before,
            chosen=chosen,
            trials=tuple(self._trials.values()),
            gain=gain if chosen is best else 1.0,
            passed_over=None if chosen is best else best,
            passed_over_gain=gain,
            steady_requests_per_s=rate,
            steady=steady,
            seconds=time.monotonic() - begin,
            devices=self._devices,
            gpu_price=self.gpu_price,
        )

    def in_use(self) -> Settings:
        """Returns the settings that the next release would have without a tuning."""
        serving = serving_settings(self.bundle)
        return Settings(
            instances=serving.instances,
            threads=serving.threads or read_runtime(Path(self.bundle.path)).threads,
            queue_delay=serving.queue_delay,
            max_batch_rows=serving.max_batch_rows,
            device=devices_for(self.bundle)[0],
        )

    def _search(self, before: Trial, until: float) -> Trial:
        """Returns the best of the devices' best settings; each device has its share of the time."""
        devices = devices_for(self.bundle)
        for number, device in enumerate(devices):
            begin = before
            if device != before.settings.device:
                try:
                    begin = self._try(replace(before.settings, device=device))
                except (BackendRefused, GpuMemoryShort, ReleaseNotReady) as error:
                    logger.info(f"not on the {device}: {error}")
                    continue
            now = time.monotonic()
            self._devices[device] = self._climb(begin, now + (until - now) / (len(devices) - number))
        return max(
            self._devices.values(), key=lambda trial: trial.requests_per_s(self.limit_ms) / self._price(trial)
        )

    def _price(self, trial: Trial) -> float:
        return self.gpu_price if trial.settings.device == "gpu" else 1.0

    def _climb(self, begin: Trial, until: float) -> Trial:
        best = begin
        for step in (self._processors, self._delays, self._limits):
            for settings in step(best.settings):
                if time.monotonic() > until or len(self._trials) == self.most_trials:
                    logger.info("no time left for more settings")
                    return best
                trial = self._try(settings, best.best(self.limit_ms))
                if trial.requests_per_s(self.limit_ms) > WORTH_IT * best.requests_per_s(self.limit_ms):
                    best = trial
        return best

    def _processors(self, now: Settings) -> Iterator[Settings]:
        """Yields instances and threads, from one instance with all cores to one instance per core."""
        here = core_count()
        counts = sorted({1, 2, max(here // 2, 1), here})
        for instances in counts:
            for threads in sorted({1, max(here // instances, 1)}):
                yield replace(now, instances=instances, threads=threads)

    def _delays(self, now: Settings) -> Iterator[Settings]:
        for delay in (0.0, *DELAYS_S):
            if delay <= self.limit_ms / 4000:
                yield replace(now, queue_delay=delay)

    def _limits(self, now: Settings) -> Iterator[Settings]:
        """Returns batch limits, never below what clients may send in one request."""
        least = self.largest_request_rows or now.max_batch_rows
        for rows in sorted({least, min(4 * least, 1024)}):
            if rows >= least:
                yield replace(now, max_batch_rows=rows)

    def _try(self, settings: Settings, near: LoadPoint | None = None) -> Trial:
        """Measures settings. `near`: the best number of clients with other settings; far smaller ones are not tried
        first."""
        if settings in self._trials:
            return self._trials[settings]
        first = max(CLIENTS.index(near.clients) - NEAR, 0) if near else 0
        points: list[LoadPoint] = []
        with self._serving(settings) as target:
            for clients in CLIENTS[first:]:
                point = self._point(target, clients)
                if point is None:
                    break
                points.append(point)
                fastest = max(each.requests_per_s for each in points)
                fell = all(each.requests_per_s < _FALLEN * fastest for each in points[-2:])
                if point.tail_ms > self.limit_ms or fell:  # twice in a row: more clients will not help
                    break
            for clients in reversed(CLIENTS[:first]):
                if any(point.tail_ms <= self.limit_ms for point in points):
                    break
                point = self._point(target, clients)
                points = [*([point] if point else []), *points]
        trial = Trial(settings=settings, points=tuple(points))
        self._trials[settings] = trial
        best = trial.best(self.limit_ms)
        figure = "too slow"
        if best:
            tail = f"{latency_name(self.share)} {best.tail_ms:.1f} ms"
            figure = f"{best.requests_per_s:,.0f} requests/s with {best.clients} clients, {tail}"
        logger.info(f"{settings}: {figure}")
        return trial

    def _point(self, target: Target, clients: int) -> LoadPoint | None:
        """Measures one point; None when a request failed: such a setting is not usable."""
        found = self._lap(target, Closed(clients=clients))
        if found.failed or not found.requests:
            logger.info(f"{clients} clients: {found.errors or 'nothing was answered'}")
            return None
        return LoadPoint(
            clients=clients,
            requests_per_s=found.requests_per_s,
            p50_ms=found.quantile_ms(0.5),
            tail_ms=found.quantile_ms(self.share),
        )

    def _lap(self, target: Target, pace: Closed | Open) -> LoadResult:
        """Measures one lap, a longer one for a model or machine that answers only a few requests in the usual time."""
        for longer in (1, 4, 16, 64):
            found = run_load(target, pace, seconds=longer * self.lap_s, warm_up_s=_WARM_UP_S)
            if found.failed or found.requests >= _ENOUGH or (longer > 1 and found.requests):
                break
        return found

    def _steady(self, best: Trial) -> tuple[float, LoadResult]:
        """Returns the highest share of the closed loop's rate at which an open loop stays below the limit; else the
        lowest tried."""
        with self._serving(best.settings) as target:
            for share in STEADY:
                rate = max(share * best.requests_per_s(self.limit_ms), 1.0)
                found = self._lap(target, Open(requests_per_s=rate))
                if found.quantile_ms(self.share) <= self.limit_ms and not found.failed:
                    break
        return rate, found

    def _in_turns(self, one: Trial, other: Trial) -> float:
        """Returns requests/s of the second over those of the first, median over rounds; each gets the load that suits
        it."""
        clients = {
            trial.settings: (trial.best(self.limit_ms) or trial.points[0]).clients for trial in (one, other)
        }
        with self._serving(one.settings) as first, self._serving(other.settings) as second:
            targets = {one.settings: first, other.settings: second}
            ratios = []
            for turn in range(ROUNDS):
                speeds = {}
                order = list(targets) if turn % 2 else list(reversed(targets))
                for settings in order:
                    point = self._point(targets[settings], clients[settings])
                    speeds[settings] = point.requests_per_s if point else 0.0
                if speeds[one.settings]:
                    ratios.append(speeds[other.settings] / speeds[one.settings])
        gain = statistics.median(ratios) if ratios else 0.0
        logger.info(f"in turns with the settings in use: {gain:.2f} times as many requests/s")
        return gain

    @contextmanager
    def _serving(self, settings: Settings) -> Iterator[Target]:
        """Runs a Triton with these settings for the block, and yields requests for it."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        store = Store(str(folder / "store"))
        bundle = copy_with(self.bundle, store, settings)
        release = Release(model=bundle.model, version=bundle.version)
        with Children() as host:
            releases = Releases(folder / "releases", host=host, store=store)
            try:
                releases.start(release)
                host.wait_for(release.name, lambda: releases.state(release) == "ready", within_s=_START_S)
                yield mixed_target(releases.endpoint(release).http, bundle, self.mix)
            finally:
                host.kill(release.name)
                releases.stop(release)
        shutil.rmtree(folder, ignore_errors=True)


def devices_for(bundle: Bundle) -> tuple[Place, ...]:
    """Returns the devices, the one in use first. A second only if the spec leaves the choice and this Triton supports
    it."""
    gpus = len(inventory())
    return possible_devices(bundle, find_triton().describe(gpus=bool(gpus)), gpus)


def possible_devices(bundle: Bundle, server: Server, gpus: int) -> tuple[Place, ...]:
    serving = serving_settings(bundle)
    now = choose_for(bundle, server=server, serving=serving, gpus=gpus).place
    # Not the choice of an earlier tuning.
    named = stored_section(Path(bundle.path), "serving").get("device", "auto")
    if named != "auto" or serving.gpus > 1 or serving.backend == "tensorrt_plan":
        return (now,)
    found = []
    for asked in ("auto", "cpu"):  # auto is a GPU only for a model that was exported for one
        try:
            other = serving.model_copy(update={"device": asked})
            found.append(choose_for(bundle, server=server, serving=other, gpus=gpus).place)
        except BackendRefused:
            continue
    return tuple(dict.fromkeys((now, *found)))
