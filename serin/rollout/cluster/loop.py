"""Runs a rollout controller while its process leads, and none while it waits.

Each term has a new controller, built from the store alone: nothing that another term believed is carried over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from serin.errors import LeadershipLost, SerinError
from serin.formats.cluster.decisions import DecisionCache, journaled_models
from serin.rollout.cluster.leadership import Leadership
from serin.store.objects import Objects

logger = logging.getLogger(__name__)


class Led(Protocol):
    """A controller with the ports of one term."""

    def take_over(self) -> None:
        """Makes it impossible for an earlier leader to decide or to act."""
        ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Loop:
    """`build`: makes the controller of a term."""

    def __init__(
        self, objects: Objects, leadership: Leadership, build: Callable[[int, DecisionCache], Led]
    ) -> None:
        self._objects, self._leadership, self._build = objects, leadership, build
        self._cache = DecisionCache(objects)
        self._led: Led | None = None
        self._term: int | None = None

    def round(self) -> None:
        """Ticks once if this process leads, else gets ready to take over."""
        term = self._leadership.term
        if term is None or term != self._term:
            self._step_down()
        try:
            if term is None:
                self._warm_up()
                return
            if self._led is None:
                self._led = self._began(term)
                self._term = term
            self._led.tick()
        except LeadershipLost as error:
            logger.warning("%s", error)
            self._leadership.lose(term if term is not None else 0)
            self._step_down()
        except (OSError, SerinError) as error:  # a decision that was not recorded was not made: retry
            logger.warning("this tick failed: %s", error)

    def close(self) -> None:
        self._step_down()

    def _began(self, term: int) -> Led:
        """Builds the controller of a term. One that could not take over has not begun."""
        led = self._build(term, self._cache)
        try:
            led.take_over()
        except BaseException:
            led.close()
            raise
        return led

    def _step_down(self) -> None:
        if self._led is not None:
            logger.info("this controller does not lead any more")
            self._led.close()
        self._led = self._term = None

    def _warm_up(self) -> None:
        """Reads the journals, so that a change of the leader does not wait for that."""
        for model in journaled_models(self._objects):
            self._cache.all(model)
