"""Log records that carry the time of what they report, where that is earlier than the moment of logging."""

from __future__ import annotations

import logging
from collections.abc import Mapping


def log_at(
    logger: logging.Logger,
    line: str,
    created: float,
    *,
    level: int = logging.INFO,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Logs a line as of `created`, in seconds since 1970."""
    if logger.isEnabledFor(level):
        record = logger.makeRecord(logger.name, level, "", 0, line, (), None, extra=extra)
        record.created, record.msecs = created, created % 1 * 1000
        logger.handle(record)
