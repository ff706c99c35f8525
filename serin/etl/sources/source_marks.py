"""What an object store or a server says of a file, as a mark that changes whenever its content does; "" when nothing
that it says can be relied on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

_OF_CONTENT = (
    "ETag", "etag", "VersionId", "version_id", "generation", "md5", "md5Hash", "Content-MD5", "content_md5", "Digest",
    "sha",
)  # fmt: skip
_OF_TIME = ("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "updated")
_SETTLED_S = 60.0  # HTTP tells whole seconds, and the server's clock is not ours


def content_mark(said: Mapping[str, Any]) -> str:
    """Versions and digests of the content; else the time of its last change with its size, when that time is past:
    within its second a file can change again, and look the same. A weak ETag promises too little by itself."""
    given = {name: str(said[name]) for name in _OF_CONTENT if said.get(name)}
    strong = {name: value for name, value in given.items() if not value.startswith("W/")}
    if strong:
        return _written({**strong, "size": said.get("size")})
    times = {name: said[name] for name in _OF_TIME if said.get(name) is not None}
    moments = [_moment(value) for value in times.values()]
    if not moments or any(moment is None or time.time() - moment < _SETTLED_S for moment in moments):
        return ""
    return _written({**given, **times, "size": said.get("size")})


def _moment(value: Any) -> float | None:
    """Returns seconds since 1970; None for an invalid time."""
    try:
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            found = value
        else:
            text = str(value)
            found = datetime.fromisoformat(text) if text[:4].isdigit() else parsedate_to_datetime(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _written(parts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(parts.items()) if value is not None)
