"""Where the Valkey is that keeps events for several hosts. Agents report it; only the step connects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from serin.errors import SpecError

_TLS: Final = {"valkey": False, "valkeys": True, "redis": False, "rediss": True}
_PORT: Final = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyPlace:
    """Where events are kept, as SERIN_EVENTS says. The password is in a file, which is read for each connection."""

    host: str
    port: int = _PORT
    database: int = 0
    user: str | None = None
    tls: bool = True
    password: Path | None = None
    authority: Path | None = None

    @classmethod
    def read(cls, url: str, password: Path | None = None, authority: Path | None = None) -> ValkeyPlace:
        """Raises SpecError for a URL that cannot be used. It is not part of the message: it may hold a password."""
        problem = ""
        try:
            parts = urlsplit(url)
            number, port = parts.path.strip("/") or "0", parts.port or _PORT
        except ValueError:
            problem = "is not a valid URL"
        else:
            if parts.scheme not in _TLS or not parts.hostname or not number.isdecimal() or parts.query:
                problem = "is not a URL such as valkeys://valkey.internal:6380/0"
            elif parts.password is not None:
                problem = "holds a password; write it to a file and name that in SERIN_EVENTS_PASSWORD_FILE"
        if problem:
            raise SpecError(where="SERIN_EVENTS", problems=[("", problem)])
        return cls(
            host=parts.hostname or "",
            port=port,
            database=int(number),
            user=parts.username,
            tls=_TLS[parts.scheme],
            password=password,
            authority=authority,
        )

    def __str__(self) -> str:
        return f"{'valkeys' if self.tls else 'valkey'}://{self.host}:{self.port}/{self.database}"
