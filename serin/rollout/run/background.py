"""A fleet whose slow work (building a repository, waiting for a process to end) does not hold up the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from serin.rollout.decide.advance import ReleaseState
from serin.rollout.run.ports import Processes
from serin.store.artifacts import Endpoint, Release


class BackgroundFleet:
    """`start` and `stop` return at once. What the work raised is raised by the next `start` or `stop` of that release.

    A release has one piece of work at a time; asking again meanwhile does nothing.
    """

    def __init__(self, fleet: Processes, *, threads: int = 4) -> None:
        self._fleet = fleet
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fleet")
        self._work: dict[Release, tuple[str, Future[None]]] = {}

    def start(self, release: Release) -> None:
        self._do("start", release, self._fleet.start)

    def stop(self, release: Release) -> None:
        self._do("stop", release, self._fleet.stop)

    def state(self, release: Release) -> ReleaseState:
        """While it is being started or stopped: starting, whatever its process says."""
        kind, work = self._work.get(release, ("", None))
        if work and not work.done():
            return "starting"
        if kind == "start" and work and work.exception():
            return "absent"  # so that it is started again, which raises why it could not be
        return self._fleet.state(release)

    def instance(self, release: Release) -> int | None:
        return self._fleet.instance(release)

    def endpoint(self, release: Release) -> Endpoint:
        return self._fleet.endpoint(release)

    def verify(self, release: Release) -> None:
        self._fleet.verify(release)

    def running(self) -> Sequence[Release]:
        """Also what is being started: it may have no process yet, and must not be forgotten when it gets one."""
        under_way = {release for release, (_, work) in list(self._work.items()) if not work.done()}
        return sorted({*self._fleet.running(), *under_way})

    def close(self) -> None:
        """Waits for what is under way."""
        self._pool.shutdown()

    def _do(self, kind: str, release: Release, action: Callable[[Release], None]) -> None:
        before, work = self._work.get(release, ("", None))
        if work and not work.done():
            return
        if work and before == kind and (error := work.exception()):
            del self._work[release]
            raise error
        self._work[release] = (kind, self._pool.submit(action, release))
