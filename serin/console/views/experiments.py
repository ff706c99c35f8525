"""The trainings of all hosts, filtered and sorted, and some of them side by side."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlencode

from serin.console.formats import duration
from serin.console.views.outcomes import Became, outcomes_of
from serin.console.views.view import Parameters
from serin.errors import NotFound
from serin.metrics import HIGHER_IS_BETTER
from serin.pipeline.experiments import (
    Catalogue,
    Experiment,
    Study,
    default_settings,
    studies,
    trainings,
)
from serin.reports.charts import Drawing, number, overlaid
from serin.spec.roles import Access

T = TypeVar("T")
Recorded = TypeVar("Recorded", Experiment, Study)

_PAGE: Final = 50
_MOST_COMPARED: Final = 8
_MOST_SETTINGS: Final = 6
_SURE: Final = 1.96  # standard errors on each side of a 95% interval
_SILENT_S: Final = 600.0
# The first that is there is shown.
_METRICS: Final = ("auc", "logloss", "rmse", "accuracy", "average_precision")
_COLOURS: Final = ("blue", "orange", "good", "purple", "sky", "olive", "rose", "grey")
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A metric with its standard error, where that is known."""

    name: str
    value: float
    error: float | None = None

    @property
    def words(self) -> str:
        return f"{self.value:.4f}" if 0.001 <= abs(self.value) < 1000 else number(self.value)

    @property
    def interval(self) -> str:
        """The half width of the 95% interval, with two digits."""
        return "" if self.error is None else f"±{_SURE * self.error:.2g}"

    @property
    def rank(self) -> float:
        """Higher for the better one."""
        rising = any(self.name.partition("_")[2].startswith(name) for name in HIGHER_IS_BETTER)
        return self.value if rising else -self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    run: str
    made: Experiment
    score: Score | None
    settings: tuple[tuple[str, str], ...] = ()
    more: int = 0  # settings that are not shown
    became: tuple[Became, ...] = ()

    @property
    def state(self) -> str:
        return shown_state(self.made)

    @property
    def seconds(self) -> float | None:
        return self.made.receipt.seconds if self.made.receipt else None

    @property
    def cost(self) -> float | None:
        return self.made.receipt.cost if self.made.receipt else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged(Generic[T]):
    """One page of many rows."""

    rows: tuple[T, ...]
    number: int
    pages: int
    count: int


_CATALOGUES: dict[Path, tuple[Catalogue[Experiment], Catalogue[Study]]] = {}


def catalogues(home: Path) -> tuple[Catalogue[Experiment], Catalogue[Study]]:
    return _CATALOGUES.setdefault(home, (trainings(home), studies(home)))


def shown_state(made: Experiment | Study) -> str:
    """Returns the state; a training elsewhere that has said nothing for long may have been killed."""
    if made.state == "running" and time.time() - made.seen > _SILENT_S:
        return "no news"
    return made.state


def read_experiments(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    found = catalogues(home)[0].read(lambda record: replace(record, curve=()))
    seen = [each for each in found.records if access.sees(each.model)]
    chosen = [each for each in seen if _fits(each, parameters)]
    rows = [Row(run=each.run, made=each, score=main_score(each.metrics, each.errors)) for each in chosen]
    page = paged(sorted_rows(rows, parameters.get("sort", "-began")), parameters.get("page", "1"))
    became, troubles = outcomes_of(home, {row.made.model for row in page.rows if row.made.model})
    vary = varying(chosen)
    return {
        "rows": [_with_details(row, vary, became) for row in page.rows],
        "page": page,
        "all": len(seen),
        "models": sorted({each.model for each in seen if each.model}),
        "kinds": sorted({_kind(each) for each in seen} - {""}),
        "states": sorted({shown_state(each) for each in seen}),
        "chosen": {name: parameters.get(name, "") for name in ("model", "kind", "state", "text")},
        "sort": parameters.get("sort", "-began"),
        "link": functools.partial(link, "/experiments", parameters),
        "troubles": [text for text in (found.trouble, *troubles) if text],
    }


def link(path: str, parameters: Parameters, **changes: str) -> str:
    """Returns the address of the same list with other parameters."""
    kept = {name: value for name, value in {**parameters, **changes}.items() if value}
    return f"{path}?{urlencode(kept)}" if kept else path


def paged(rows: Sequence[T], asked: str) -> Paged[T]:
    """Returns the page that was asked for, or the nearest that there is."""
    pages = max(1, math.ceil(len(rows) / _PAGE))
    page = min(max(int(asked) if asked.isdecimal() and len(asked) < 7 else 1, 1), pages)
    return Paged(
        rows=tuple(rows[(page - 1) * _PAGE : page * _PAGE]), number=page, pages=pages, count=len(rows)
    )


def sorted_rows(rows: Sequence[Row], by: str) -> list[Row]:
    """Returns the rows by a column, or by what it starts with after a '-', the largest first. What has no value is
    last."""
    value = _SORTS.get(by.removeprefix("-"), _SORTS["began"])
    known = [row for row in rows if value(row) is not None]
    return sorted(known, key=value, reverse=by.startswith("-")) + [row for row in rows if value(row) is None]


_SORTS: Final[Mapping[str, Callable[[Row], Any]]] = {
    "began": lambda row: row.made.began,
    "run": lambda row: row.run,
    "model": lambda row: row.made.model,
    "state": lambda row: row.state,
    "metric": lambda row: (row.score.name, row.score.rank) if row.score else None,
    "took": lambda row: row.seconds,
    "cost": lambda row: row.cost,
}


def _fits(made: Experiment, parameters: Parameters) -> bool:
    wanted = {"model": made.model, "kind": _kind(made), "state": shown_state(made)}
    if any(parameters.get(name) and parameters[name] != value for name, value in wanted.items()):
        return False
    words = parameters.get("text", "").lower().split()
    if not words:
        return True
    settings = (f"{path}={plain(value)}" for path, value in made.settings.items())
    text = " ".join((made.run, made.host, made.dataset, *settings)).lower()
    return all(word in text for word in words)


def varying(made: Sequence[Experiment]) -> set[str]:
    """Returns the settings that are not the same in all trainings; of a single one, all."""
    seen: dict[str, Any] = {}
    found = set[str]()
    for each in made:
        for path, value in each.settings.items():
            if seen.setdefault(path, value) != value:
                found.add(path)
    return found if len(made) > 1 else set(seen)


def _with_details(row: Row, vary: set[str], became: Mapping[str, tuple[Became, ...]]) -> Row:
    changed = _changed(row.made, vary)
    return replace(
        row,
        settings=tuple(changed[:_MOST_SETTINGS]),
        more=max(len(changed) - _MOST_SETTINGS, 0),
        became=became.get(row.run, ()),
    )


def _changed(made: Experiment, among: Collection[str] | None = None) -> list[tuple[str, str]]:
    """Returns the settings that are not the defaults, or those of them that are `among` others."""
    usual = _usual()
    return [
        (path.partition(".")[2], plain(value))
        for path, value in made.settings.items()
        if (path not in usual or usual[path] != value) and (among is None or path in among)
    ]


@functools.cache
def _usual() -> dict[str, Any]:
    return default_settings()


def _kind(made: Experiment) -> str:
    return str(made.settings.get("model.kind") or "")


def plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def main_score(metrics: Mapping[str, float], errors: Mapping[str, float]) -> Score | None:
    """Returns the first known metric of the test rows, else of the valid rows, else any."""
    names = [f"{split}_{name}" for split in ("test", "valid") for name in _METRICS]
    name = next((each for each in (*names, *metrics) if each in metrics), None)
    return None if name is None else Score(name=name, value=metrics[name], error=errors.get(name))


def read_compared(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    names = list(dict.fromkeys(name for name in parameters.get("run", "").split(",") if name))
    catalogue = catalogues(home)[0]
    found = {name: find_seen(catalogue, name, access) for name in names[:_MOST_COMPARED]}
    made = [each for each in found.values() if each is not None]
    if names and not made:
        known = [each.run for each in catalogue.read().records if access.sees(each.model)]
        raise NotFound(kind="training", name=names[0], known=known)
    became, troubles = outcomes_of(home, {each.model for each in made if each.model})
    paths = list(dict.fromkeys(path for each in made for path in each.settings))
    values = {
        path: [plain(each.settings[path]) if path in each.settings else "-" for each in made]
        for path in paths
    }
    differing = [path for path in paths if len(set(values[path])) > 1]
    return {
        "made": made,
        "states": [shown_state(each) for each in made],
        "swatches": [_swatch(place) for place in range(len(made))],
        "scores": _scores(made),
        "differing": {path: values[path] for path in differing},
        "equal": {path: values[path][0] for path in paths if path not in differing},
        "changed": [_changed(each) for each in made],
        "datasets": len({each.dataset for each in made}),
        "costs": _costs(made),
        "became": [became.get(each.run, ()) for each in made],
        "curves": _curves(made),
        "missing": [name for name, each in found.items() if each is None],
        "left_out": max(len(names) - _MOST_COMPARED, 0),
        "most": _MOST_COMPARED,
        "troubles": troubles,
        "here": [(home / "runs" / each.run).is_dir() for each in made],
    }


def find_seen(catalogue: Catalogue[Recorded], name: str, access: Access) -> Recorded | None:
    """Returns a training or search of a model that somebody may view; None: there is none of this name."""
    found = catalogue.find(name)
    return found if found is not None and access.sees(found.model) else None


def _scores(made: Sequence[Experiment]) -> dict[str, list[tuple[Score | None, bool]]]:
    """Returns by metric each run's score, and whether it is the best of several."""
    names = sorted({name for each in made for name in each.metrics}, key=_order)
    rows = {}
    for name in names:
        scores = [
            Score(name=name, value=each.metrics[name], error=each.errors.get(name))
            if name in each.metrics
            else None
            for each in made
        ]
        best = max((score.rank for score in scores if score), default=None)
        many = len({score.value for score in scores if score}) > 1
        rows[name] = [(score, bool(many and score and score.rank == best)) for score in scores]
    return rows


def _order(name: str) -> tuple[int, int, str]:
    split, _, metric = name.partition("_")
    place = _METRICS.index(metric) if metric in _METRICS else len(_METRICS)
    return {"test": 0, "valid": 1}.get(split, 2), place, name


def _costs(made: Sequence[Experiment]) -> dict[str, list[str]]:
    """Returns rows of receipts; one that nobody has measured is left out."""
    receipts = [each.receipt for each in made]
    rows: dict[str, list[str]] = {
        "Time": [duration(each.seconds) if each else "-" for each in receipts],
        "Devices": [
            ", ".join(dict.fromkeys(cost.name for cost in each.device)) if each else "-" for each in receipts
        ],
        "Rows/s": [number(each.rows_per_s) if each and each.rows_per_s else "-" for each in receipts],
        "Energy": [f"{number(each.joules)} J" if each and each.joules else "-" for each in receipts],
        "Cost": [f"{each.cost:.2f}" if each and each.cost is not None else "-" for each in receipts],
        "Limited by": [(each.bound or "-") if each else "-" for each in receipts],
        "Advice": [(each.advice or "-") if each else "-" for each in receipts],
    }
    return {name: row for name, row in rows.items() if set(row) != {"-"}}


def _swatch(place: int) -> str:
    drawing = Drawing(26, 10)
    dashes = _DASHES[place].replace("9", "6")
    drawing.line([(0, 5), (26, 5)], _COLOURS[place], width=4, dashes=dashes)
    return drawing.embedded(f"line {place + 1}").replace("<svg ", '<svg class="key" ', 1)


def _curves(made: Sequence[Experiment]) -> list[tuple[str, str]]:
    """Draws each metric over the epochs or rounds of all runs."""
    names = sorted({name for each in made for point in each.curve for name in point.metrics}, key=_order)
    found = []
    for name in names:
        lines = [
            (
                each.run,
                _COLOURS[place],
                _DASHES[place],
                [(point.at, point.metrics[name]) for point in each.curve if name in point.metrics],
            )
            for place, each in enumerate(made)
        ]
        across = " or ".join(sorted({each.across for each in made if each.curve}))
        drawing = overlaid([line for line in lines if line[3]], across)
        ends = ", ".join(f"{run} ends at {points[-1][1]:.4g}" for run, _, _, points in lines if points)
        found.append((name, drawing.embedded(f"{name} over {across}s: {ends}")))
    return found
