"""Requests that SQLite refused are repeated in the server, alone; everything else passes through once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from serin.prefect.server import App, Message, Receive, Repeating, Scope, Send

REFUSAL = sqlite3.OperationalError("database is locked")


class Client:
    """One request and what came back."""

    def __init__(self, method: str = "POST", pieces: tuple[bytes, ...] = (b"a", b"b")) -> None:
        self.scope = {"type": "http", "method": method, "path": "/", "headers": []}
        self._pieces = list(pieces)
        self.messages: list[Message] = []

    async def receive(self) -> Message:
        if not self._pieces:
            return {"type": "http.disconnect"}
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    async def ask(self, app: App) -> Client:
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        (start, *_) = self.messages
        assert [message["type"] for message in self.messages].count("http.response.start") == 1
        return int(start["status"])


async def answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"x", b"y")]})
    await send({"type": "http.response.body", "body": b"text"})


class Server:
    """Answers with each of `statuses` in turn; raises `error` after an answer that says that something failed, as
    Starlette does."""

    def __init__(self, *statuses: int, error: Exception | None = REFUSAL) -> None:
        self._statuses, self._error = list(statuses), error
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] += "seen"
        assert scope["path"] == "/seen"
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        assert (await receive())["type"] == "http.disconnect"
        status = self._statuses.pop(0)
        await answer(send, status)
        if status >= 500 and self._error:
            raise self._error


def test_a_refused_request_is_repeated_with_the_same_body_and_answered_once() -> None:
    server = Server(503, 503, 201)
    client = asyncio.run(Client().ask(Repeating(server)))
    assert client.status == 201
    assert [message.get("body") for message in client.messages] == [None, b"text"]
    assert server.bodies == [b"ab"] * 3


def test_what_is_refused_to_the_end_is_to_come_again_soon() -> None:
    server, client = Server(503, 503, 503), Client()
    with pytest.raises(sqlite3.OperationalError):
        asyncio.run(client.ask(Repeating(server, tries=3)))
    assert client.status == 503
    assert client.messages[0]["headers"] == [(b"x", b"y"), (b"retry-after", b"1")]
    assert client.messages[1]["body"] == b"text"


@pytest.mark.parametrize(
    ("method", "status", "error"),
    [("POST", 503, None), ("POST", 200, None), ("POST", 500, REFUSAL), ("GET", 503, REFUSAL)],
)
def test_other_answers_pass_through_once(method: str, status: int, error: Exception | None) -> None:
    server, client = Server(status, error=error), Client(method)

    async def ask() -> None:
        await client.ask(Repeating(server))

    if error:
        with pytest.raises(sqlite3.OperationalError):
            asyncio.run(ask())
    else:
        asyncio.run(ask())
    assert client.status == status
    assert client.messages[0]["headers"] == [(b"x", b"y")]
    assert len(server.bodies) == 1


def test_connections_of_other_kinds_pass_through() -> None:
    seen = []

    async def app(scope: Scope, *_: Any) -> None:
        seen.append(scope["type"])

    async def ask() -> None:
        for kind in ("lifespan", "websocket"):
            await Repeating(app)({"type": kind}, Client().receive, Client().send)

    asyncio.run(ask())
    assert seen == ["lifespan", "websocket"]


def reads_then_writes(database: Path) -> App:
    """An application that adds one to a number as Prefect's would: read, do something else, write."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        connection = sqlite3.connect(database, timeout=60, isolation_level=None)
        try:
            connection.execute("BEGIN")
            (number,) = connection.execute("SELECT number FROM numbers").fetchone()
            await asyncio.sleep(0.001)
            connection.execute("UPDATE numbers SET number = ?", (number + 1,))
            connection.execute("COMMIT")
        except sqlite3.OperationalError:
            await answer(send, 503)
            raise
        finally:
            connection.close()
        await answer(send, 200)

    return app


@pytest.mark.parametrize("wrap", [Repeating, lambda app: app])
def test_all_of_many_changes_at_once_are_made(tmp_path: Path, wrap: Callable[[App], App]) -> None:
    database, count = tmp_path / "numbers.db", 40
    with sqlite3.connect(database) as connection:
        connection.executescript("PRAGMA journal_mode=WAL; CREATE TABLE numbers AS SELECT 0 AS number")
    app = wrap(reads_then_writes(database))

    async def ask_all() -> list[int]:
        clients = [Client() for _ in range(count)]
        asked: list[Coroutine[Any, Any, Client]] = [client.ask(app) for client in clients]
        await asyncio.gather(*asked, return_exceptions=True)
        return [client.status for client in clients]

    statuses = asyncio.run(ask_all())
    (number,) = sqlite3.connect(database).execute("SELECT number FROM numbers").fetchone()
    assert number == statuses.count(200)
    if isinstance(app, Repeating):
        assert statuses == [200] * count
    else:
        assert 503 in statuses, "else nothing is shown by the other case"
