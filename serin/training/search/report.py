"""What a search leaves for people: every trial as a table, what mattered as a picture, the choice as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from serin.machine.durable import write_whole
from serin.training.search.objective import objective_name
from serin.training.search.study import Tried

_INK, _FAINT, _BEST = "#1f2937", "#9ca3af", "#0f766e"


def write_report(folder: Path, tried: Sequence[Tried], best: Tried, importance: Mapping[str, float]) -> None:
    """trials.csv, result.json and importance.png in `folder`."""
    write_whole(folder / "trials.csv", trials_csv(tried))
    document = {
        "format": "serin.search",
        "version": 1,
        "settings": best.settings,
        "metrics": best.metrics,
        "trial": best.number,
        "importance": dict(importance),
        "trials": [_row(one) for one in tried],
    }
    write_whole(folder / "result.json", json.dumps(document, indent=1) + "\n")
    write_whole(folder / "importance.png", draw(tried, best, importance))


def trials_csv(tried: Sequence[Tried]) -> str:
    paths = sorted({path for one in tried for path in one.settings})
    name = next((objective_name(one.metrics) for one in tried if one.metrics), "valid")
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["trial", "state", name, "seconds", *paths, "reason"])
    for one in tried:
        metric = one.metrics.get(name, "")
        settings = [json.dumps(one.settings[path]) if path in one.settings else "" for path in paths]
        writer.writerow([one.number, one.state, metric, _seconds(one), *settings, one.reason])
    return out.getvalue()


def draw(tried: Sequence[Tried], best: Tried, importance: Mapping[str, float]) -> bytes:
    """Left: each complete trial and the best so far. Right: how much each setting decides."""
    from matplotlib.figure import Figure

    name = objective_name(best.metrics)
    complete = [
        (one.number, one.metrics[name]) for one in tried if name in one.metrics and one.value is not None
    ]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.scatter(*zip(*complete, strict=True), s=18, color=_FAINT)
    left.scatter([best.number], [best.metrics[name]], s=48, color=_BEST, label=f"best: trial {best.number}")
    left.set(title=f"{len(complete)} complete trials", xlabel="trial", ylabel=name)
    left.legend(frameon=False)
    order = sorted(importance, key=lambda path: importance[path])
    right.barh(order, [importance[path] for path in order], color=_BEST)
    right.set(
        title="What decided" if order else "Too few trials to say what decided", xlabel="share", xlim=(0, 1)
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _row(one: Tried) -> dict[str, object]:
    return {
        "trial": one.number,
        "state": one.state,
        "settings": one.settings,
        "metrics": one.metrics,
        "seconds": _seconds(one),
        "reason": one.reason,
    }


def _seconds(one: Tried) -> float | None:
    return None if one.seconds is None else round(one.seconds, 2)
