"""Experiments: what each training and each search was, how it went and what it cost.

A run's folder has all of it. What is shown is also kept as one small document by the run's name, in the home and in a
store that hosts share (store/stage_results.py): other hosts see it there, and it outlives the folder.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from serin.errors import SerinError
from serin.machine import environment
from serin.machine.documents import UNFIT
from serin.machine.locks import unused
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.objects import Files
from serin.store.receipt import Receipt
from serin.store.runs import model_of, run_lock, runs
from serin.store.stage_results import keep_result, shared_objects
from serin.store.store import Store
from serin.training.launch.job import read_status
from serin.training.launch.progress import progress_file

logger = logging.getLogger(__name__)

_KIND, _SEARCHES = "experiments", "searches"
_FILES: Final = (
    "training.json", "status.json", "receipt.json", "model", "progress.jsonl", "result/metrics.json", "result.json",
    "trials.json",
)  # fmt: skip
_MOST_POINTS: Final = 200  # of a curve
_SHARED_EVERY_S: Final = 15.0
_READS_AT_ONCE: Final = 16
UNREADABLE: Final = "unreadable"
_OPEN: Final = ("running", "unfinished")  # whether it runs is not in its files


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Metrics after an epoch, or after a round of trees."""

    at: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What every run has. `seen`: when it was so; `trouble`: why it cannot be read."""

    run: str
    state: str
    model: str | None = None
    host: str = ""
    began: float | None = None
    seen: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(_Run):
    """A training. `settings`: by their path in the spec. `errors`: the standard errors of metrics that have one."""

    reason: str = ""
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    dataset: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    across: str = "epoch"
    curve: tuple[Point, ...] = ()
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    trial: int
    state: str
    settings: Mapping[str, JsonValue]
    metrics: Mapping[str, float]
    seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Study(_Run):
    """A search over settings. `best`: the number of its best trial."""

    best: int | None = None
    importance: Mapping[str, float] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()


Record = TypeVar("Record", bound=_Run)
_EXPERIMENT, _STUDY = TypeAdapter(Experiment), TypeAdapter(Study)
_PROBLEMS: Final = (OSError, *UNFIT)


def flat(section: str, values: Mapping[str, Any]) -> Iterator[tuple[str, JsonValue]]:
    """Returns the settings of a section by their path in the spec."""
    for name, value in values.items():
        path = f"{section}.{name}"
        if isinstance(value, dict) and value:
            yield from flat(path, value)
        else:
            yield path, value


def default_settings() -> dict[str, JsonValue]:
    """Returns the settings of a spec that sets none."""
    sections = {"model": ModelSpec(), "training": TrainingSpec()}
    return {
        path: value
        for name, section in sections.items()
        for path, value in flat(name, section.model_dump(mode="json"))
    }


def describe_training(folder: Path) -> Experiment:
    """Returns what a training's folder says; one that is damaged is named with what is wrong."""
    try:
        return _EXPERIMENT.validate_python(_training(folder))
    except _PROBLEMS as error:
        return Experiment(
            run=folder.name, model=model_of(folder), state=UNREADABLE, trouble=_trouble(folder, error)
        )


def _training(folder: Path) -> dict[str, Any]:
    job = _content(folder / "training.json")
    result = _content(folder / "result" / "metrics.json")
    curve, across = _curve(folder, result)
    state, reason = "done", ""
    if not result:
        status = read_status(folder)
        state, reason = (status.state, status.reason) if status else (_going(folder), "")
    receipt = Receipt.load_file(folder / "receipt.json")
    metrics = result.get("metrics") or (curve[-1].metrics if curve else {})
    return {
        "run": folder.name,
        "state": state,
        "model": model_of(folder),
        "reason": reason,
        "host": environment.host(),
        "began": receipt.started if receipt else _written(folder / "training.json"),
        "seen": time.time(),
        "settings": {
            path: value for name in ("model", "training") for path, value in flat(name, job.get(name, {}))
        },
        "dataset": job.get("dataset_digest", ""),
        "metrics": metrics,
        "errors": result.get("errors", {}),
        "across": across,
        "curve": curve,
        "receipt": receipt,
    }


def _curve(folder: Path, result: Mapping[str, Any]) -> tuple[list[Point], str]:
    """Returns the metrics of the valid rows as the training went, and what they are counted in."""
    epochs = {int(each["epoch"]): _of_epoch(each) for each in result.get("epochs", ())}
    rounds: dict[int, dict[str, float]] = {}
    for record in _records(folder) if not epochs else ():
        if record["event"] == "epoch":
            epochs[int(record["epoch"])] = _of_epoch(record)
        elif record.get("metrics"):
            rounds[int(record["round"])] = record["metrics"]
    found, across = (epochs, "epoch") if epochs else (rounds, "round")
    every = len(found) // _MOST_POINTS + 1
    kept = [at for place, at in enumerate(sorted(found)) if place % every == 0 or place == len(found) - 1]
    return [Point(at=at, metrics=found[at]) for at in kept], across


def _of_epoch(record: Mapping[str, Any]) -> dict[str, float]:
    metrics = {f"valid_{name.removeprefix('valid_')}": value for name, value in record["metrics"].items()}
    return metrics if record.get("loss") is None else {"train_loss": record["loss"], **metrics}


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    """Returns the progress so far; of hosts that train together, that of one of them."""
    own = sorted((folder / "hosts").glob("*/progress.jsonl"))
    for file in [each for each in (progress_file(folder), *own) if each.is_file()][:1]:
        for line in file.read_bytes().splitlines():
            yield json.loads(line)


def describe_search(folder: Path) -> Study:
    """Returns what a search's folder says, also while it runs; one that is damaged is named with what is wrong."""
    try:
        return _STUDY.validate_python(_search(folder))
    except _PROBLEMS as error:
        return Study(
            run=folder.name, model=model_of(folder), state=UNREADABLE, trouble=_trouble(folder, error)
        )


def _search(folder: Path) -> dict[str, Any]:
    result = _content(folder / "result.json")
    found = result or _content(folder / "trials.json")
    return {
        "run": folder.name,
        "state": "done" if result else _going(folder),
        "model": model_of(folder),
        "host": environment.host(),
        "began": _written(folder / "model"),
        "seen": time.time(),
        "best": found.get("trial"),
        "importance": found.get("importance", {}),
        "trials": found.get("trials", []),
    }


def _content(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty when there is no file."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def _going(folder: Path) -> str:
    """Returns whether a run without an end is in use by a process of this machine."""
    with unused(run_lock(environment.home(), folder.name)) as free:
        return "unfinished" if free else "running"


def _written(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _trouble(folder: Path, error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{folder}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{folder}: {error}"


def keep_experiment(folder: Path, receipt: Receipt | None = None) -> None:
    """Keeps what is shown of a training. `receipt`: of all its attempts; None: what its folder has. A store that does
    not answer is only reported: the training does not depend on it."""
    found = describe_training(folder)
    _keep(_KIND, replace(found, receipt=receipt or found.receipt))


def keep_study(folder: Path) -> None:
    """Keeps what is shown of a search."""
    _keep(_SEARCHES, describe_search(folder))


def _keep(kind: str, found: Experiment | Study) -> None:
    try:
        keep_result(environment.home(), kind, found.run, found)
    except (SerinError, OSError) as error:
        logger.warning(f"the console of other hosts does not show {found.run}: {error}")


class Progress:
    """Shows other hosts how a training goes: `hear` gets each of its records."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock, self._due = folder, clock, 0.0
        self._shared = environment.shared_store_url() is not None

    def hear(self, record: Mapping[str, Any]) -> None:
        if self._shared and record["event"] in ("started", "epoch", "note") and self._clock() >= self._due:
            keep_experiment(self._folder)
            self._due = self._clock() + _SHARED_EVERY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[Record]):
    """The newest first; `trouble`: why those of other hosts are missing."""

    records: tuple[Record, ...]
    trouble: str = ""


class Catalogue(Generic[Record]):
    """All records of a kind that this home and the store of several hosts know. What has not changed since the last
    call is not read again."""

    def __init__(
        self, home: Path, kind: str, adapter: TypeAdapter[Record], describe: Callable[[Path], Record]
    ) -> None:
        self._home, self._kind, self._adapter, self._describe = home, kind, adapter, describe
        self._lock = threading.Lock()
        self._known: dict[str, tuple[object, Record]] = {}

    def read(self, shorten: Callable[[Record], Record] = lambda record: record) -> Found[Record]:
        """Returns all records, each as `shorten` makes it, which saves memory."""
        with self._lock:
            own = self._read_own(shorten)
            others, trouble = dict[str, Record](), ""
            try:
                others = self._read_shared(own, shorten)
            except (SerinError, OSError) as error:
                trouble = f"runs of other hosts are not shown: {error}"
            self._known = {
                name: known for name, known in self._known.items() if name in own or name in others
            }
        found = sorted((*own.values(), *others.values()), key=lambda each: (-(each.began or 0.0), each.run))
        return Found(records=tuple(found), trouble=trouble)

    def find(self, run: str) -> Record | None:
        """Returns one record whole."""
        if run in self._own_runs():
            return self._own(run)
        shared = shared_objects()
        stored = None if shared is None else shared.read(f"stages/{self._kind}/{run}.json")
        return None if stored is None else self._load(run, stored.content)

    def _read_own(self, shorten: Callable[[Record], Record]) -> dict[str, Record]:
        found = dict[str, Record]()
        folders, documents = self._places()
        for run in self._own_runs():
            signature = _signature(f"{folders}/{run}", f"{documents}/{run}.json")
            known = self._known.get(run)
            if known is None or known[0] != signature or known[1].state in _OPEN:
                known = signature, shorten(self._own(run))
            found[run] = known[1]
            self._known[run] = known
        return found

    def _own(self, run: str) -> Record:
        """Returns a run of this home, from its document unless its folder has changed since."""
        folders, documents = self._places()
        folder, document = folders / run, documents / f"{run}.json"
        if _is_newer(document, folder):
            record = self._load(run, document.read_bytes())
            if record.state not in _OPEN or not folder.is_dir():
                return record
        return self._describe(folder)

    def _places(self) -> tuple[Path, Path]:
        """Returns where folders and documents of runs are."""
        return self._home / "runs", self._home / "stages" / self._kind

    def _read_shared(self, own: Iterable[str], shorten: Callable[[Record], Record]) -> dict[str, Record]:
        if shared_objects() is None:
            return {}
        files, prefix = Store.open().shared_files(), f"stages/{self._kind}/"
        now, known = time.time(), {*own}
        signatures = {
            entry.key.removeprefix(prefix).removesuffix(".json"): (entry.size, round(now - entry.age_s))
            for entry in files.entries(prefix)
        }
        names = [name for name in signatures if name not in known]
        new = [name for name in names if self._known.get(name, (None,))[0] != signatures[name]]
        with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
            for name, record in threads.map(lambda name: (name, self._fetch(files, prefix, name)), new):
                if record is not None:
                    self._known[name] = signatures[name], shorten(record)
        return {name: self._known[name][1] for name in names if name in self._known}

    def _fetch(self, files: Files, prefix: str, name: str) -> Record | None:
        stored = files.read(f"{prefix}{name}.json")
        return None if stored is None else self._load(name, stored.content)

    def _load(self, run: str, content: bytes) -> Record:
        try:
            return self._adapter.validate_json(content)
        except ValidationError as error:
            damaged = {
                "run": run,
                "state": UNREADABLE,
                "trouble": _trouble(Path(f"{self._kind}/{run}"), error),
            }
            return self._adapter.validate_python(damaged)

    def _own_runs(self) -> list[str]:
        """Returns the runs of this kind that have a folder here, or had one."""
        here = {run for run in runs(self._home) if run.startswith("search-") == (self._kind == _SEARCHES)}
        return sorted(here | {path.stem for path in self._places()[1].glob("*.json")})


def trainings(home: Path) -> Catalogue[Experiment]:
    return Catalogue(home, _KIND, _EXPERIMENT, describe_training)


def studies(home: Path) -> Catalogue[Study]:
    return Catalogue(home, _SEARCHES, _STUDY, describe_search)


def _signature(folder: str, document: str) -> tuple[tuple[int, int], ...]:
    """Returns what changes with a run. A file that is replaced as a whole changes its folder; others are looked at."""
    return tuple(map(_stat, (document, folder, f"{folder}/receipt.json", f"{folder}/progress.jsonl")))


def _stat(path: Path | str) -> tuple[int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116 - a thousand runs have thousands of files
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _is_newer(document: Path, folder: Path) -> bool:
    """Returns whether the document was kept after the run's last change."""
    return _stat(document)[0] > max(_stat(folder / name)[0] for name in _FILES)
