"""Scheduled scoring that is killed by kill -9 at random points: each row is in the target once, whatever the target.

    python -m tests.chaos.scores [--targets parquet delta sqlite postgres] [--kills 20] [--rows 3000] [--seed 1]

Rows arrive before each run: files for a folder of Parquet, versions of a Delta table for a Delta table, rows of a table
for a table of the same database. Half of the runs die before a random change to a file, the others at a random moment
of the commit, which native code does. Then scoring is repeated until nothing is left, and all is compared.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deltalake as _delta  # noqa: F401  -- imported once, before the first fork
import distributed as _dask  # noqa: F401
import numpy as np

from serin.monitoring.capture import bulk as _records  # noqa: F401
from serin.monitoring.capture.read import captured
from serin.pipeline import new_rows as _new_rows  # noqa: F401
from serin.pipeline.score import open_target, score_new
from serin.scoring import bulk as _bulk  # noqa: F401
from serin.scoring.targets.delta import DeltaTarget
from serin.scoring.targets.folder import FolderTarget
from serin.scoring.targets.sql import SqlTarget
from serin.store.store import Store
from tests.fakes.live_quality import publish
from tests.fakes.postgres import running_postgres
from tests.kit.score_tables import Delta, Files, Result, Source, Sql, arrived
from tests.signals import send
from tests.unit.serving import bundles

TARGETS = ("parquet", "delta", "sqlite", "postgres")
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate", "os.link")
_DATABASE = "SERIN_TEST_DATABASE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    target: str
    runs: int  # that were started, until nothing was left
    killed: int
    in_commit: int  # of these: after the commit had begun
    rows: int  # that arrived
    lost: int
    doubled: int
    wrong: int  # scores that are not the model's
    watermarks: int
    watermarked_rows: int
    records_lost: int
    records_doubled: int

    @property
    def right(self) -> bool:
        wrong = (self.lost, self.doubled, self.wrong, self.records_lost, self.records_doubled)
        return not any(wrong) and self.watermarked_rows == self.rows


def play(kind: str, folder: Path, *, kills: int, rows: int, seed: int) -> Played:
    source, result = _places(kind, folder)
    in_child(lambda: publish(Store.open(), 0.0, "{capture: {share: 1}}"))
    chance, runs, killed, in_commit = random.Random(seed), 1, 0, 0
    in_child(partial(_arrive, source, 0, rows))
    whole = _attempt(source, result)  # and measures
    for number in range(1, kills + 1):
        first = number * rows
        in_child(partial(_arrive, source, first, rows))
        late = kind != "parquet" and number % 2 == 0
        ended = _attempt(
            source,
            result,
            change=None if late else chance.randint(1, whole.changes),
            delay_s=chance.uniform(0, whole.commit_s) if late else None,
        )
        runs, killed = runs + 1, killed + ended.killed
        in_commit += ended.killed and ended.committing
    while in_child(lambda: score_new(bundles.MODEL, source.entry, result.entry, workers=2) is not None):
        runs += 1
    found = in_child(lambda: _compare(result, (kills + 1) * rows, rows))
    return Played(target=kind, runs=runs, killed=killed, in_commit=in_commit, **found)


def _arrive(source: Source, first: int, rows: int) -> None:
    source.add(arrived(first, rows))


def _places(kind: str, folder: Path) -> tuple[Source, Result]:
    if kind == "parquet":
        return Files(folder / "rows"), Files(folder / "scored")
    if kind == "delta":
        return Delta(str(folder / "rows")), Delta(str(folder / "scored"))
    if kind == "sqlite":
        (folder / "database").touch()
        os.environ[_DATABASE] = f"sqlite:///{folder}/database"
    return Sql(f"env:{_DATABASE}", "arrived"), Sql(f"env:{_DATABASE}", "scores")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    killed: bool
    committing: bool
    changes: int = 0
    commit_s: float = 0.0


def _attempt(
    source: Source, result: Result, *, change: int | None = None, delay_s: float | None = None
) -> Ended:
    """One run in its own process. It is killed before this change to a file, or so long after its commit has begun."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(writer, lambda: _score(source, result, change, writer))
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        committing = said.read(1) == b"c"
        if committing and delay_s is not None:
            time.sleep(delay_s)
            send(signal.SIGKILL, child)
        rest = said.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"exit status {status}"
    measured = {} if killed else json.loads(rest)
    return Ended(killed=killed, committing=committing, **measured)


def _score(source: Source, result: Result, change: int | None, writer: int) -> dict[str, float]:
    seen, commit_s = 0, 0.0

    def count(event: str, given: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in _CHANGES:
            seen += 1
            if seen == change:
                os.kill(os.getpid(), signal.SIGKILL)

    def announced(commit: Callable[..., None]) -> Callable[..., None]:
        def announce(*given: Any) -> None:
            nonlocal commit_s
            os.write(writer, b"c")
            began = time.perf_counter()
            commit(*given)
            commit_s = time.perf_counter() - began

        return announce

    for target in (FolderTarget, DeltaTarget, SqlTarget):
        target.commit = announced(target.commit)  # type: ignore[method-assign, assignment]
    sys.addaudithook(count)
    score_new(bundles.MODEL, source.entry, result.entry, workers=2)
    return {"changes": seen, "commit_s": commit_s}


def _compare(result: Result, rows: int, step: int) -> dict[str, int]:
    found = result.read().sort_by("row")
    numbers = found.column("row").to_numpy()
    bundle = Store.open().bundle(bundles.MODEL, 1)
    wanted = np.concatenate(
        [bundles.score(bundle.path, bundles.rows(step, seed=first))[:, 0] for first in range(0, rows, step)]
    )
    scores = found.column("score").to_numpy()
    target = open_target(result.entry)
    runs = target.read_runs()
    records = captured(Path(os.environ["SERIN_HOME"]), bundles.MODEL, columns=["_id", "_row"])
    recorded = list(zip(*(records.column(name).to_pylist() for name in ("_id", "_row")), strict=True))
    kept = "run-" if isinstance(target, FolderTarget) else ".lock"
    left = [
        path.name for path in target.folder.glob("*") if not path.name.startswith((kept, ".lock", ".gone"))
    ]
    assert not left, left
    return {
        "rows": rows,
        "lost": rows - len(set(numbers.tolist())),
        "doubled": len(numbers) - len(set(numbers.tolist())),
        "wrong": int((np.abs(scores - wanted[numbers]) > 1e-6).sum()),
        "watermarks": len(runs),
        "watermarked_rows": sum(run.rows for run in runs.values()),
        "records_lost": rows - len(set(recorded)),
        "records_doubled": len(recorded) - len(set(recorded)),
    }


def in_child(act: Callable[[], Any]) -> Any:
    """What it returns in its own process: this one has no threads and opens nothing, so that it can be forked."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(writer, act)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        content = said.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"exit status {status}"
    return json.loads(content)


def _in_child(writer: int, act: Callable[[], Any]) -> None:
    status = 1
    try:
        found = act()
        os.write(writer, json.dumps(found, default=str).encode())
        status = 0
    finally:
        sys.stderr.flush()
        if status:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for kind in given.targets:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serin-scores-")))
            os.environ["SERIN_HOME"] = str(folder / "home")
            if kind == "postgres":
                os.environ[_DATABASE] = stack.enter_context(running_postgres())
            played = play(kind, folder, kills=given.kills, rows=given.rows, seed=given.seed)
        print(json.dumps(asdict(played)), flush=True)
        assert played.right, "rows or records are lost or doubled, or a watermark is wrong"
        assert played.in_commit or kind == "parquet" or not given.kills, (
            "no run was killed while it committed"
        )


if __name__ == "__main__":
    main()
