"""Stores the result of a stage by its key: one small JSON file each, so that nothing is computed twice.

<home>/stages/<stage>/<key>.json; the key is a digest of everything the stage may depend on (stage_keys.py). Where
SERIN_STORE names a store, other hosts may use it too: results are then also kept there, under the same name. Prefect's
own cache is not used: its entries do not notice a checkpoint that was removed, and finding out would take a GPU's slot.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from serin.errors import StoreNotConditional
from serin.machine import environment
from serin.machine.durable import write_whole
from serin.machine.locks import try_lock
from serin.store.objects import Objects
from serin.store.open import open_objects

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_POLL_S = 0.2


def find_result(home: Path, stage: str, key: str, kind: type[Result]) -> Result | None:
    """The result kept for `key`, here or by another host; None also for a file that is damaged or of another form: the
    stage is run again. Its path may be one of another host."""
    try:
        return TypeAdapter(kind).validate_json(_file(home, stage, key).read_bytes())
    except (FileNotFoundError, ValidationError):
        pass
    shared = shared_objects()
    found = None if shared is None else shared.read(_shared_key(stage, key))
    try:
        return None if found is None else TypeAdapter(kind).validate_json(found.content)
    except ValidationError:
        return None


def keep_result(home: Path, stage: str, key: str, result: Any) -> None:
    """Whole or not at all, here and for other hosts."""
    path, content = _file(home, stage, key), json.dumps(dataclasses.asdict(result))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    shared = shared_objects()
    if shared is not None:
        shared.put(_shared_key(stage, key), content.encode())


def shared_objects() -> Objects | None:
    """The objects of the store that SERIN_STORE names; None without one, and where it has no conditional writes."""
    url = environment.shared_store_url()
    try:
        return None if url is None else open_objects(url)
    except StoreNotConditional:
        return None


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


def _shared_key(stage: str, key: str) -> str:
    return f"stages/{stage}/{key}.json"


def _file(home: Path, stage: str, key: str) -> Path:
    return home / "stages" / stage / f"{key}.json"


# Prefect keeps results on the disk of the host that ran, which others cannot read.
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`value`: the stage's result as JSON. `notes`: what was noted for the run (stage_keys.py)."""

    value: dict[str, Any]
    notes: Sequence[dict[str, Any]]


def share_outcome(run: str, value: Any, notes: Sequence[dict[str, Any]]) -> None:
    """Does nothing without a store that hosts share."""
    shared = shared_objects()
    if shared is not None:
        content = {"value": dataclasses.asdict(value), "notes": list(notes)}
        shared.put(_key(run), json.dumps(content).encode())


def read_outcome(run: str) -> Outcome | None:
    shared = shared_objects()
    found = None if shared is None else shared.read(_key(run))
    return None if found is None else Outcome(**json.loads(found.content))


def _key(run: str) -> str:
    return f"runs/{run}.json"
