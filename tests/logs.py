"""What Serin logs, for tests that look at it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def heard(to: Callable[[str], object]) -> Iterator[None]:
    """Within the block, each line that Serin logs is given to `to`."""
    logger, handler = logging.getLogger("serin"), _Calling(to)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Calling(logging.Handler):
    def __init__(self, to: Callable[[str], object]) -> None:
        super().__init__()
        self._to = to

    def emit(self, record: logging.LogRecord) -> None:
        self._to(record.getMessage())
