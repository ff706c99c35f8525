"""Why a model was trained again: what was noticed, since when, and about which release. Stored with the version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Self, cast

from serin.machine.typed_json import Document

Kind = Literal["asked", "nightly", "data", "drift", "quality"]
_PLAIN: Mapping[Kind, str] = {
    "asked": "somebody asked for it",
    "nightly": "it is trained every night",
    "data": "its tables have changed",
    "drift": "the event serin.drift was sent",
    "quality": "the event serin.quality was sent",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason(Document, omit=("since", "release", "facts")):
    """`text`: the reason as a clause, such as "carrier drifted since 2026-11-09 04:10 UTC". `since`: when it began;
    `noticed`: when that was noticed, both in seconds since 1970. `release`: the release it was noticed about. `facts`:
    numbers and names for machines."""

    kind: Kind
    text: str
    since: float | None = None
    noticed: float
    release: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    @classmethod
    def of_event(cls, kind: Kind, payload: Mapping[str, Any] | None, *, now: float) -> Self:
        """The reason that an event's payload gives: an alert (serin.alert), or any other. Anyone may send the event,
        with any payload: what is not usable is left out."""
        given = payload or {}
        since, release, facts = _time(given.get("since")), given.get("release"), given.get("facts")
        text, title = _text(given.get("text")), _text(given.get("title"))
        if title:
            text = title if since is None else f"{title} since {utc(since)}"
        return cls(
            kind=kind,
            text=text or _PLAIN[kind],
            noticed=min(_time(given.get("noticed", given.get("fired"))) or now, now),
            since=since,
            release=release if isinstance(release, str) else None,
            facts=dict(facts) if isinstance(facts, Mapping) else {},
        )


def read_reason(lineage: Mapping[str, Any]) -> Reason | None:
    """The reason in the lineage of a version; None when it was not trained again by itself."""
    try:
        return Reason.from_json(lineage["reason"])
    except (KeyError, ValueError):
        return None


def utc(t: float) -> str:
    """A time as people read it in reasons: 2026-11-09 04:10 UTC."""
    return f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d %H:%M} UTC"


def _text(value: object) -> str:
    return " ".join(value.split())[:500] if isinstance(value, str) else ""


def _time(value: object) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11
    return float(cast("float", value)) if usable else None
