"""Stores the result of a stage by its key: one small JSON file each, so that nothing is computed twice.

<home>/stages/<stage>/<key>.json; the key is a digest of everything the stage may depend on (stage_keys.py). Prefect's
own cache is not used: its entries do not notice a checkpoint that was removed, and finding out would take a GPU's slot.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from serin.machine.durable import write_whole
from serin.machine.locks import try_lock

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_POLL_S = 0.2


def find_result(home: Path, stage: str, key: str, kind: type[Result]) -> Result | None:
    """The result kept for `key`; None also for a file that is damaged or of another form: the stage is run again."""
    try:
        return TypeAdapter(kind).validate_json(_file(home, stage, key).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def keep_result(home: Path, stage: str, key: str, result: Any) -> None:
    """Whole or not at all."""
    path = _file(home, stage, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dataclasses.asdict(result)))


@contextmanager
def one_at_a_time(home: Path, stage: str, key: str, *, stop: threading.Event | None = None) -> Iterator[bool]:
    """Hold the stage's lock for `key`: a second run of the same waits, and then finds what the first one did. Gives
    whether it had to wait.

    The kernel frees the lock when its holder dies. A wait ends early when `stop` is set; the block is entered all the
    same, since what it does looks at `stop` itself.
    """
    path = _file(home, stage, key).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        waited = False
        while not try_lock(file.fileno()) and not (stop and stop.wait(_POLL_S)):
            if not waited:
                logger.info(f"another run does the same {stage}; waiting for it")
                waited = True
            if stop is None:
                time.sleep(_POLL_S)
        yield waited


def receipt_file(home: Path, stage: str, key: str) -> Path:
    """Where the receipt of the work for `key` is kept. A training's is in its folder."""
    return _file(home, stage, key).with_suffix(".receipt.json")


def _file(home: Path, stage: str, key: str) -> Path:
    return home / "stages" / stage / f"{key}.json"
