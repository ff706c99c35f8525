"""A refresh of lookups that is killed when it comes to a step.

python -m tests.unit.pipeline.killed_refresh STORE MODEL MODULE:STEP
"""

import os
import signal
import sys
from functools import reduce
from importlib import import_module
from typing import Any

from serin.pipeline.lookups import _find_or_publish, _refreshable
from serin.store.store import Store


def end(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    url, model, step = sys.argv[1:]
    module, _, path = step.partition(":")
    *owners, name = path.split(".")
    setattr(reduce(getattr, owners, import_module(module)), name, end)
    store = Store(url)
    base = store.bundle(model, 1)
    _find_or_publish(store, base, *_refreshable(base), base.release, None)


if __name__ == "__main__":
    main()
