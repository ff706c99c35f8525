"""The searches of all hosts, and one with its trials."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from serin.console.views.experiments import (
    Score,
    catalogues,
    find_seen,
    link,
    main_score,
    paged,
    plain,
    shown_state,
)
from serin.console.views.view import Parameters
from serin.errors import NotFound
from serin.pipeline.experiments import Study, Trial
from serin.reports.search import SearchChart, search_chart
from serin.spec.roles import Access


def read_searches(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    found = catalogues(home)[1].read()
    seen = [each for each in found.records if access.sees(each.model)]
    page = paged(seen, parameters.get("page", "1"))
    return {
        "page": page,
        "rows": [
            (study, shown_state(study), _counts(study), best, _score(best) if best else None)
            for study in page.rows
            for best in [_best(study)]
        ],
        "plain": plain,
        "link": functools.partial(link, "/experiments/searches", parameters),
        "trouble": found.trouble,
    }


def read_search(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    name = parameters["run"]
    catalogue = catalogues(home)[1]
    study = find_seen(catalogue, name, access)
    if study is None:
        known = [each.run for each in catalogue.read().records if access.sees(each.model)]
        raise NotFound(kind="search", name=name, known=known)
    best = _best(study)
    score = _score(best) if best else None
    trials = sorted(study.trials, key=lambda each: -rank.rank if (rank := _score(each)) else math.inf)
    page = paged(trials, parameters.get("page", "1"))
    return {
        "study": study,
        "state": shown_state(study),
        "best": best,
        "score": score,
        "counts": _counts(study),
        "chart": _search_chart(study, best, score) if best and score else None,
        "paths": sorted({path for each in study.trials for path in each.settings}),
        "page": page,
        "rows": [(each, _score(each)) for each in page.rows],
        "plain": plain,
        "trained": _trained_with(home, study, best) if best else [],
        "link": functools.partial(link, f"/experiments/searches/{name}", {}),
    }


def _score(trial: Trial) -> Score | None:
    return main_score({n: value for n, value in trial.metrics.items() if n.startswith("valid_")}, {})


def _best(study: Study) -> Trial | None:
    """Returns the best trial; of a search that has not ended, the best so far."""
    complete = [each for each in study.trials if each.state == "complete" and _score(each)]
    named = next((each for each in complete if each.trial == study.best), None)
    return named or max(
        complete, key=lambda each: score.rank if (score := _score(each)) else 0.0, default=None
    )


def _counts(study: Study) -> str:
    states = [each.state for each in study.trials]
    found = [(state, states.count(state)) for state in ("complete", "pruned", "failed", "running", "waiting")]
    return ", ".join(f"{count} {state}" for state, count in found if count) or "no trial yet"


def _search_chart(study: Study, best: Trial, score: Score) -> str:
    values = {
        each.trial: each.metrics[score.name]
        for each in study.trials
        if each.state == "complete" and score.name in each.metrics
    }
    chart = SearchChart(metric=score.name, values=values, best=best.trial, importance=study.importance)
    words = ", ".join(f"{path} {share:.0%}" for path, share in study.importance.items())
    label = f"{len(values)} complete trials; the best is {best.trial} with {score.name} {score.words}"
    return search_chart(chart).embedded(f"{label}. Importance: {words or 'not known'}")


def _trained_with(home: Path, study: Study, best: Trial) -> list[str]:
    """Returns the trainings of the model that have the best trial's settings."""
    found = catalogues(home)[0].read(lambda record: replace(record, curve=())).records
    return [
        each.run
        for each in found
        if each.model == study.model
        and all(each.settings.get(path) == value for path, value in best.settings.items())
    ]
