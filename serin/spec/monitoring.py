"""The section `monitoring`: what is recorded and watched once a version is live, and what an alarm leads to."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from serin.errors import nearest
from serin.spec.section import Duration, Section, Size, is_empty

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:per|/)\s*(day|week|month|year)")
FEWEST_WEEKS = 8  # of training rows that show how much weeks differ
_PER_YEAR = {"day": 365.0, "week": 365.0 / 7, "month": 12.0, "year": 1.0}


def tolerance_problem(why: str) -> tuple[str, str]:
    """What is wrong with a spec whose tolerance cannot be measured."""
    return "monitoring.drift.tolerance", (
        f"is missing: {why} it cannot be taken from the weeks of the training period; name the shift of a bin's share "
        "that is not drift, for example 0.05"
    )


def weeks_problem(weeks: int) -> tuple[str, str] | None:
    """What is wrong when the tolerance is to come from so many complete weeks."""
    if weeks >= FEWEST_WEEKS:
        return None
    return tolerance_problem(f"with {weeks} weeks of training rows (it takes {FEWEST_WEEKS})")


def per_year(value: Any) -> Any:
    """'1 per year', '2 per month' or a number per year -> a number per year."""
    if not isinstance(value, str):
        return value
    match = _RATE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a valid rate: use a number and a period, such as '1 per year'")
    return float(match[1]) * _PER_YEAR[match[2]]


RatePerYear = Annotated[
    float,
    BeforeValidator(per_year),
    PlainSerializer(lambda value: f"{value:g} per year", return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [{"type": "number"}, {"type": "string", "pattern": rf"^\s*{_RATE.pattern}\s*$"}],
            "examples": ["1 per year", "1 per month"],
        }
    ),
]
"""A number per year in Python, '1 per year' in YAML."""


class CaptureSpec(Section):
    """Which requests are recorded, with their columns and scores."""

    share: float = Field(default=0.0, ge=0, le=1)
    """The share of requests to record, from 0 (none) to 1 (all). Lots are drawn by the request's id."""
    mask: tuple[str, ...] = ()
    """Request columns whose values are replaced by null in the records."""
    drop: tuple[str, ...] = ()
    """Request columns that are left out of the records."""
    keep: Duration = Field(default=30 * 86_400.0, gt=0)
    """How long records are kept."""
    max_size: Size = Field(default=10_000_000_000, gt=0)
    """The most disk space that the model's records take. The oldest hours are deleted first."""

    def problems(self, columns: Collection[str]) -> Iterator[tuple[str, str]]:
        """Masked and dropped columns that are not among `columns`, those of a request: a typing mistake must not record
        what was to be hidden."""
        for key, names in (("mask", self.mask), ("drop", self.drop)):
            for name in names:
                if name not in columns:
                    hint = nearest(name, columns)
                    yield f"monitoring.capture.{key}", f"{name!r} is not a column of a request{hint}"

    def not_replayable(self, columns: Collection[str] | None = None) -> str:
        """Why the recorded requests cannot be sent to another version, and what to do; empty: they can. `columns`:
        those of a request, if they are known; other names are mistakes that `problems` reports."""
        if self.share == 0:
            return (
                "none are recorded (monitoring.capture.share is 0); set it, such as 0.1, or leave shadow out"
            )
        named = (("mask", self.mask), ("drop", self.drop))
        hidden = {key: [name for name in names if columns is None or name in columns] for key, names in named}
        names = ", ".join(name for found in hidden.values() for name in found)
        if not names:
            return ""
        keys = " and ".join(key for key, found in hidden.items() if found)
        return f"they lack {names} (monitoring.capture.{keys}); record these columns, or leave shadow out"


class DriftSpec(Section):
    """When live traffic counts as different from the training rows."""

    false_alarms: RatePerYear = Field(default=1.0, gt=0)
    """How many false alarms are accepted on average, over all columns of the model together."""
    tolerance: float | None = Field(default=None, gt=0, lt=1)
    """The shift that is not drift: how much the share of a bin or a category may differ from training. By default as
    much as the weeks of the training period differ among themselves; it must be named when the data has no time column
    or covers fewer than eight weeks."""
    block: Literal["10 seconds", "minute", "hour", "day", "week"] | None = Field(
        default=None, exclude_if=is_empty
    )
    """The time over which shares are taken, with at least 200 rows (50 in ten seconds). By default, for each column,
    the shortest at which the shares of the training rows do not follow each other or a daily pattern; a day without a
    time column. Nulls and unseen values that training hardly had are always judged every 10 seconds. With eight weeks
    of training rows, all columns are judged every 10 seconds for large shifts as well, unless a block is named."""
    columns: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The request columns to watch. By default all of them, and the scores."""


class QualitySpec(Section):
    """How good the live version must be once labels are known."""

    margin: float = Field(gt=0)
    """By how much the mean loss per row may exceed the loss on the test rows: the Brier score in a binary task, the
    share of wrong classes with several, the squared error as a share of the test rows' in a regression."""
    false_alarms: RatePerYear = Field(default=1.0, gt=0)
    """How many false alarms are accepted on average."""
    rollback: bool = False
    """Return to the previous version when the live one is worse than the margin allows. A rollout in its bake is rolled
    back in any case."""


class RetrainBudgetSpec(Section):
    """How often retraining may happen by itself."""

    cool_down: Duration = Field(default=86_400.0, ge=0)
    """The time after the start of a retraining in which no other one starts. A nightly one does not wait for it."""
    per_week: int = Field(default=3, ge=1)
    """The most retrainings within seven days. Nightly ones are bounded by their schedule and do not count, nor does one
    that finds unchanged tables and trains nothing."""


class MonitoringSpec(Section):
    """What happens to a version once it is live."""

    capture: CaptureSpec = Field(default=CaptureSpec(), exclude_if=lambda value: value == CaptureSpec())
    """Which requests are recorded. By default none."""
    drift: DriftSpec | None = Field(default=None, exclude_if=is_empty)
    """When live traffic counts as different from the training rows. Needs recorded requests. By default not watched."""
    quality: QualitySpec | None = Field(default=None, exclude_if=is_empty)
    """How good the live version must be once labels are known (`serin labels add`). By default only shown."""
    rollback_on_burn: bool = Field(default=False, exclude_if=is_empty)
    """Return to the previous version when the budget of `objectives` burns too fast since a release. Otherwise an alert
    is sent."""
    retrain: tuple[Literal["nightly", "data", "drift", "quality"], ...] = ()
    """When the live version is trained again from its own spec: every night (`nightly`), when its tables have changed
    (`data`), on a drift alarm (`drift`), or on a quality alarm (`quality`). The result is rolled out unless it is
    worse. By default never."""
    retrain_budget: RetrainBudgetSpec = Field(
        default=RetrainBudgetSpec(), exclude_if=lambda value: value == RetrainBudgetSpec()
    )
    """The limits of retraining without a person: a pause between two, and a number per week."""

    def quality_problems(self, *, has_data: bool) -> Iterator[tuple[str, str]]:
        """Why quality cannot be watched, as (key, problem and how to fix it)."""
        if self.quality is None:
            return
        if not has_data:
            problem = "needs data: without a target nobody knows what a label means; take it out"
            yield "monitoring.quality", problem
        elif not self.capture.share:
            problem = "needs recorded requests: set monitoring.capture.share, for example to 0.1"
            yield "monitoring.quality", problem

    def drift_problems(
        self, request_columns: Collection[str], *, has_time: bool
    ) -> Iterator[tuple[str, str]]:
        """Why drift cannot be watched, as (key, problem and how to fix it). `request_columns`: none for a model that
        defines its own inputs."""
        if self.drift is None:
            return
        if not request_columns:
            problem = "needs data: without training rows there is nothing to compare with; take it out"
            yield "monitoring.drift", problem
            return
        if not self.capture.share:
            problem = "needs recorded requests: set monitoring.capture.share, for example to 0.1"
            yield "monitoring.drift", problem
        if self.drift.tolerance is None and not has_time:
            yield tolerance_problem("without data.time")
        hidden = {*self.capture.mask, *self.capture.drop}
        for name in self.drift.columns or ():
            if name not in request_columns:
                text = f"{name!r} is not a column of a request{nearest(name, request_columns)}"
                yield "monitoring.drift.columns", text
            elif name in hidden:
                text = f"{name!r} is not recorded: monitoring.capture masks or drops it; take it out of one of them"
                yield "monitoring.drift.columns", text
