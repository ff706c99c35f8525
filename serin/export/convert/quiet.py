"""Keeps the advice of other packages out of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Silences advice of the logger `name` ("" for all), such as that of exporters about packages and preprocessing
    that these graphs do not need."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
