"""The spec of a server that Serin does not run (`serin rollout start --stable URL --candidate URL --spec FILE`). Each
of its keys is used, or refused by name with the reason: none is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from serin.errors import SpecError
from serin.spec.load import checked_spec, spec_file
from serin.spec.pipeline import PipelineSpec
from serin.spec.yaml_file import read_mapping

_NOT_MADE_HERE: Final = "nothing is trained or exported here; take it out"
_ITS_OWN: Final = "the server decides that itself; take it out"
DECISIONS: Mapping[str, str] = {
    "name": "",
    "data": "no tables are read for it; leave data.target alone, which says what a label means. Rows to compare with "
    "are given with --reference",
    "data.target": "",
    "data.target.known_at_serving": "the leak check of a training reads it, and nothing is trained here; take it out",
    "features": _NOT_MADE_HERE,
    "etl": _NOT_MADE_HERE,
    "model": _NOT_MADE_HERE,
    "model.task": "",
    "model.classes": "",
    "training": _NOT_MADE_HERE,
    "search": _NOT_MADE_HERE,
    "environment": _NOT_MADE_HERE,
    "priority": _NOT_MADE_HERE,
    "export": _NOT_MADE_HERE,
    "export.segments": "",
    "champion": _NOT_MADE_HERE,
    "objectives": "",
    "serving": _ITS_OWN,
    "serving.request_timeout": "",
    "serving.rate_limit": "",
    "serving.rate_burst": "",
    "rollout": "",
    "rollout.shadow": "see rollout.steps: shadow needs a bundle; take it out",
    "rollout.second_opinion": "a server that runs elsewhere cannot be restarted here; take it out",
    "rollout.baseline": "a server that runs elsewhere cannot be started a second time; take it out",
    "monitoring": "",
    "monitoring.retrain": _NOT_MADE_HERE,
    "monitoring.retrain_budget": _NOT_MADE_HERE,
}
"""By key: why it is refused; empty: it is used. It holds for the keys below it that have no entry."""


def load_elsewhere(model: str, source: Path | Mapping[str, Any]) -> tuple[PipelineSpec, dict[str, Any]]:
    """The spec of a model that is served elsewhere, and the same as a plain mapping that is stored with its versions.
    SpecError names every key that cannot be used."""
    where = str(source) if isinstance(source, Path) else model
    given = read_mapping(spec_file(source)) if isinstance(source, Path) else dict(source)
    own = {
        key: value for key, value in (given.get("model") or {}).items() if (key, value) != ("kind", "server")
    }
    document = {**given, "model": own} if own else {key: given[key] for key in given if key != "model"}
    problems = [*_refused(document)]
    if document.get("name", model) != model:
        problems.append(("name", f"is {document['name']!r}, and the rollout is of {model!r}"))
    if "shadow" in ((document.get("rollout") or {}).get("steps") or ()):
        reason = (
            "shadow compares a candidate with what its bundle computes, and a server elsewhere has no bundle; leave "
            "shadow out"
        )
        problems.append(("rollout.steps", reason))
    if problems:
        raise SpecError(where=where, problems=problems)
    document = {**document, "name": model, "model": {**own, "kind": "server"}}
    return checked_spec(document, where=where), document


def _refused(given: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in given.items():
        key = f"{above}{name}"
        below = any(each.startswith(f"{key}.") for each in DECISIONS)
        if below and isinstance(value, Mapping):
            yield from _refused(value, f"{key}.")
        elif reason := why_refused(key):
            yield key, reason


def why_refused(key: str) -> str:
    """Why a key has no meaning for a server elsewhere; empty: it has one, or it is not a key."""
    while key not in DECISIONS:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return ""
    return DECISIONS[key]


def problems(spec: PipelineSpec, columns: Sequence[str], *, has_time: bool) -> list[tuple[str, str]]:
    """What the spec asks for and the server cannot have. `columns`: of a request; none: they are not known. `has_time`:
    the rows that live ones are compared with have times."""
    monitoring, found = spec.monitoring, []
    if spec.has_target and spec.model.task is not None:
        found.append(("model.task", "data.target says it already; take it out"))
    if columns:
        found += monitoring.capture.problems(columns)
        found += [
            ("export.segments", f"{name!r} is not a column of a request")
            for name in spec.export.segments
            if name not in columns
        ]
    found += monitoring.quality_problems(has_data=spec.has_target)
    if columns:
        found += monitoring.drift_problems(columns, has_time=has_time)
    elif monitoring.drift is not None:
        found.append(
            ("monitoring.drift", "needs recorded requests: set monitoring.capture.share, for example to 0.1")
        )
    return found
