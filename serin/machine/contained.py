"""Contains what fails for one of several models, so that the others are still looked at."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from serin.errors import LeadershipLost, SerinError, StoreUnreachable, file_trouble


@contextmanager
def contained(failures: MutableMapping[str, str], name: str) -> Iterator[None]:
    """Notes an error of a file or a part under `name`, the first one only, and lets the caller continue.

    A store that is away concerns all, and is raised: each of them would wait for it.
    """
    try:
        yield
    except (LeadershipLost, StoreUnreachable):
        raise
    except SerinError as error:
        failures.setdefault(name, str(error))
    except OSError as error:
        failures.setdefault(name, file_trouble(error))
