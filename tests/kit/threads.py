"""Work in threads beside a test."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(*targets: Callable[[], object], stop: threading.Event | None = None) -> Iterator[None]:
    """Each target runs in a thread while the block does. At its end `stop` is set, and all of them have ended."""
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        if stop is not None:
            stop.set()
        for thread in threads:
            thread.join(60)
