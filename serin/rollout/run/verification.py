"""Verifies golden rows in a thread beside the controller's tick, so that a slow model does not delay the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from serin.errors import LeadershipLost, SerinError, StoreUnreachable
from serin.rollout.decide.state import Rollout
from serin.rollout.run.ports import Fleet

FOREIGN: Final = (SerinError, OSError)  # errors that a port may raise
TRANSIENT: Final = (StoreUnreachable, LeadershipLost)  # of these, those that say nothing about a release

Beside = Callable[[Callable[[], None]], "Future[None]"]


class Verifications:
    """Runs at most one verification per model. A result that arrives after its rollout has moved on is dropped."""

    def __init__(self, fleet: Fleet, beside: Beside | None = None) -> None:
        self._fleet, self._beside = fleet, beside or in_thread
        self._under_way: dict[str, tuple[tuple[str, float], Future[None]]] = {}

    def of(self, now: Rollout) -> tuple[bool, str]:
        """Returns whether a rollout's verification has passed, and why the candidate did not answer correctly. It is
        started at the first call, and never waited for."""
        which = (now.id, now.since)
        known, work = self._under_way.get(now.model, (None, None))
        if work is None or known != which:
            work = self._beside(lambda: self._verify(now))
            self._under_way[now.model] = (which, work)
        if not work.done():
            return False, ""
        try:
            work.result()
        except TRANSIENT:
            del self._under_way[now.model]  # begun again with the next call
            return False, ""
        except FOREIGN as error:
            return False, str(error)
        return True, ""

    def _verify(self, now: Rollout) -> None:
        self._fleet.verify(now.candidate)
        if now.stable:
            same_requests = now.plan.steps[0] < 100 or now.plan.shadow is not None
            self._fleet.check_fits(now.candidate, now.stable, share=same_requests)
        if now.baseline:
            self._fleet.verify(now.baseline)


def in_thread(work: Callable[[], None]) -> Future[None]:
    """Runs `work` in a daemon thread, which does not keep the process alive."""
    future: Future[None] = Future()
    threading.Thread(target=run, args=(work, future), name="verify", daemon=True).start()
    return future


def run(work: Callable[[], None], future: Future[None]) -> None:
    try:
        work()
    except FOREIGN as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(error)  # also raised where the result is read
        raise
    else:
        future.set_result(None)
