"""When a worker asks for runs after events. The pauses are short; what the server shows is set by each test."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from deployments.workers.asking import Asking

BOUND_S = 30.0
SHORT_S = (0.0, 0.001, 0.002, 0.004)


class Server:
    """Shows runs once they are committed, and gives each away once."""

    def __init__(self) -> None:
        self.committed = self.given = self.asked = 0
        self.shows_after = 0  # so many requests come before the commit
        self.while_asked: list[Callable[[], None]] = []  # each is called during one request

    async def ask(self) -> int:
        self.asked += 1
        if self.while_asked:
            self.while_asked.pop()()
        if self.asked <= self.shows_after:
            return 0
        found, self.given = self.committed - self.given, self.committed
        return found


def asked(script: Callable[[Server, Asking], Coroutine[Any, Any, None]]) -> Server:
    server = Server()

    async def act() -> None:
        asking = Asking(server.ask, pauses_s=SHORT_S)
        task = asyncio.create_task(asking.run())
        async with asyncio.timeout(BOUND_S):
            await script(server, asking)
        task.cancel()

    asyncio.run(act())
    return server


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (of a server that no event reports)
        await asyncio.sleep(0.001)


def test_a_run_that_is_there_is_taken_with_one_request() -> None:
    async def script(server: Server, asking: Asking) -> None:
        server.committed = 1
        asking.heard()
        await until(lambda: server.given == 1)
        await asyncio.sleep(2 * sum(SHORT_S))

    assert asked(script).asked == 1


def test_a_run_whose_event_came_before_its_commit_is_taken_after_it() -> None:
    async def script(server: Server, asking: Asking) -> None:
        server.committed, server.shows_after = 1, len(SHORT_S) - 1
        asking.heard()
        await until(lambda: server.given == 1)

    asked(script)


def test_finding_one_run_does_not_end_the_search_for_another() -> None:
    """Two events, of which the second run is committed after the first one was taken."""

    async def script(server: Server, asking: Asking) -> None:
        server.committed = 1
        asking.heard()
        asking.heard()
        await until(lambda: server.given == 1)
        server.committed = 2
        await until(lambda: server.given == 2)

    asked(script)


def test_an_event_that_is_heard_while_asking_counts() -> None:
    """Its run is committed some requests later."""

    async def script(server: Server, asking: Asking) -> None:
        server.committed = 1
        server.while_asked = [asking.heard]
        asking.heard()
        await until(lambda: server.asked == 3)
        server.committed = 2
        await until(lambda: server.given == 2)

    asked(script)


def test_many_events_at_once_cost_no_more_requests_than_one() -> None:
    """Of runs that are due later, as a schedule makes them."""

    async def script(server: Server, asking: Asking) -> None:
        for _ in range(100):
            asking.heard()
        await until(lambda: server.asked == len(SHORT_S))
        await asyncio.sleep(2 * sum(SHORT_S))

    assert asked(script).asked == len(SHORT_S)


def test_an_event_long_after_runs_that_were_never_found_is_answered_with_one_request() -> None:
    async def script(server: Server, asking: Asking) -> None:
        asking.heard()
        await until(lambda: server.asked == len(SHORT_S))
        await asyncio.sleep(2 * sum(SHORT_S))
        server.committed, server.asked = 1, 0
        asking.heard()
        await until(lambda: server.given == 1)
        await asyncio.sleep(2 * sum(SHORT_S))

    assert asked(script).asked == 1
