"""Runs the slow work of a fleet (building a repository, waiting for an exit) without blocking the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from serin.rollout.decide.advance import ReleaseState
from serin.rollout.run.ports import Processes
from serin.store.artifacts import Release


class BackgroundFleet:
    """A fleet whose `start` and `stop` return at once. An error of the work is raised by the next `start` or `stop`.

    A release has one piece of work at a time; another request for it in the meantime does nothing.
    """

    def __init__(self, fleet: Processes, *, threads: int = 4) -> None:
        self._fleet = fleet
        self.instance, self.endpoint, self.verify = fleet.instance, fleet.endpoint, fleet.verify
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fleet")
        self._work: dict[Release, tuple[str, Future[None]]] = {}

    def start(self, release: Release) -> None:
        self._do("start", release, self._fleet.start)

    def stop(self, release: Release) -> None:
        self._do("stop", release, self._fleet.stop)

    def state(self, release: Release) -> ReleaseState:
        """Returns "starting" while the release is being started or stopped, whatever its process reports."""
        kind, work = self._work.get(release, ("", None))
        if work and not work.done():
            return "starting"
        if kind == "start" and work and work.exception():
            return "absent"  # so that it is started again, which raises the reason of the failure
        return self._fleet.state(release)

    def running(self) -> Sequence[Release]:
        """Returns the running releases and those being started, which may not have a process yet."""
        under_way = {release for release, (_, work) in list(self._work.items()) if not work.done()}
        return sorted({*self._fleet.running(), *under_way})

    def close(self) -> None:
        """Waits for work in progress."""
        self._pool.shutdown()

    def _do(self, kind: str, release: Release, action: Callable[[Release], None]) -> None:
        before, work = self._work.get(release, ("", None))
        if work and not work.done():
            return
        if work and before == kind and (error := work.exception()):
            del self._work[release]
            raise error
        self._work[release] = (kind, self._pool.submit(action, release))
