"""Keeps the events of keys in Valkey: several hosts read one state and write it once.

Two calls per update: the contents are read, and stored by a script that compares what was read with what is there. So
two hosts that change a key at the same moment do so one after the other. A server that would forget events is not used:
one that does not write them to its disk, evicts keys when its memory is full, or is a replica. Each new connection is
asked, since a server that was restarted may have other settings.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from redis import Redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError
from redis.retry import Retry

from serin.errors import StateUnavailable
from serin.windows.ring import expires_at
from serin.windows.state import Change
from serin.windows.valkey_place import ValkeyPlace

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 0.5  # after that the state is away
_LOOK_S: Final = 0.5  # whether it is back
_TRIES: Final = 100  # that find a key changed by another host in the meantime
_MARGIN_MS: Final = 60_000  # that the clock of the server may be ahead
_OWNER: Final = b"serin"  # the key that says whose events a database keeps
_NEEDED: Final[Mapping[str, tuple[str, str]]] = {
    "role": ("master", "it is a replica; name the primary"),
    "aof_enabled": ("1", "it keeps nothing on its disk; set `appendonly yes`"),
    "maxmemory_policy": (
        "noeviction",
        "it drops keys when its memory is full; set `maxmemory-policy noeviction`",
    ),
    "cluster_enabled": ("0", "it is part of a cluster, which cannot change keys of several windows at once"),
}
"""What INFO must say, and the problem otherwise."""
# ARGV: for each key the digest of what was read ("" for nothing), then the content to store, then its expiry.
_STORE: Final = """
for place, key in ipairs(KEYS) do
  local kept = redis.call('GET', key)
  if (kept and redis.sha1hex(kept) or '') ~= ARGV[3 * place - 2] then return 0 end
end
for place, key in ipairs(KEYS) do
  if ARGV[3 * place - 1] == '' then redis.call('DEL', key)
  else redis.call('SET', key, ARGV[3 * place - 1], 'PXAT', ARGV[3 * place]) end
end
return 1
"""


class ValkeyState:
    """`owner`: of the events, such as the URL of a store. A database keeps those of one owner."""

    def __init__(self, place: ValkeyPlace, owner: str) -> None:
        self._place, self._owner = place, hashlib.sha256(owner.encode()).hexdigest()[:16].encode()
        more: dict[str, Any] = {"ssl": True, "ssl_ca_certs": place.authority} if place.tls else {}
        more["redis_connect_func"] = self._check_server  # it is called with the connection
        self._client: Any = Redis(
            host=place.host,
            port=place.port,
            db=place.database,
            username=place.user,
            credential_provider=None if place.password is None else _Password(place.user, place.password),
            socket_timeout=_ANSWER_S,
            socket_connect_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 0),
            **more,
        )
        self._stop, self._problem = threading.Event(), self._look()
        self._looking = threading.Thread(target=self._keep_looking, name="valkey", daemon=True)
        self._looking.start()

    def update(self, keys: Sequence[bytes], change: Change) -> None:
        if not keys:
            change({})
            return
        with self._mapped():
            for _ in range(_TRIES):
                kept = dict(zip(keys, self._client.mget(keys), strict=True))
                changed = change(kept)
                if not changed or self._store(kept, changed):
                    return
        raise StateUnavailable(reason="other hosts change the same keys all the time")

    def drop_expired(self, now_us: int) -> int:  # noqa: ARG002 (the interface's)
        """Valkey does this itself, by the expiry of each key."""
        return 0

    def size(self) -> tuple[int, int]:
        """The bytes are those of the whole server."""
        with self._mapped():
            return self._client.dbsize() - 1, self._client.info("memory")["used_memory"]

    def close(self) -> None:
        self._stop.set()
        self._looking.join()
        self._client.close()

    def _store(self, kept: Mapping[bytes, bytes | None], changed: Mapping[bytes, bytes | None]) -> bool:
        """False: a key is not what was read any more."""
        words: list[bytes | str | int] = []
        for key, content in changed.items():
            before = kept[key]
            words.append("" if before is None else hashlib.sha1(before, usedforsecurity=False).hexdigest())
            words += ["", 0] if content is None else [content, expires_at(content) // 1000 + _MARGIN_MS]
        return bool(self._client.eval(_STORE, len(changed), *changed, *words))

    def _look(self) -> str:
        """Why the server cannot be used now; empty when it can."""
        try:
            self._client.connection_pool.disconnect(inuse_connections=False)  # a new one is checked
            self._client.ping()
        except (RedisError, OSError) as error:
            return f"{self._place}: {error}"
        return ""

    def _check_server(self, connection: Any) -> None:
        """Raises RedisError when the server of a new connection would forget events, or keeps another owner's."""
        connection.on_connect()
        connection.send_command("INFO", "everything")
        text = connection.read_response().decode()
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        for name, (value, problem) in _NEEDED.items():
            if facts.get(name) != value:
                raise RedisError(problem)
        connection.send_command("SET", _OWNER, self._owner, "NX", "GET")
        if connection.read_response() not in (None, self._owner):
            raise RedisError(
                "this database keeps the events of another store; name another number in SERIN_EVENTS"
            )

    def _keep_looking(self) -> None:
        """Looks whether a server that went away is back. Requests do not wait for it in the meantime."""
        while not self._stop.wait(_LOOK_S):
            if self._problem:
                self._problem = self._look()
                if not self._problem:
                    logger.warning("the events are there again: %s", self._place)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        if self._problem:
            raise StateUnavailable(reason=self._problem)
        try:
            yield
        except (RedisError, OSError) as error:
            self._problem = f"{self._place}: {error}"
            raise StateUnavailable(reason=self._problem) from error


class _Password(CredentialProvider):
    def __init__(self, user: str | None, file: Path) -> None:
        self._user, self._file = user, file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        if self._file.stat().st_mode & 0o007:
            raise PermissionError(f"{self._file} can be read by others; run `chmod o= {self._file}`")
        password = self._file.read_text(encoding="utf-8").strip()
        return (password,) if self._user is None else (self._user, password)
