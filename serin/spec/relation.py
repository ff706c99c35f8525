"""The sections `data.joins`, `data.unique` and `data.windows`: how tables become one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from serin.spec.section import NAMES, Duration, Section, is_empty

Source = Literal["request", "lookup", "online", "training_only"]
"""Where a column comes from at serving time: the client sends it, the bundle holds it, the platform computes it from
earlier events, or it is not available."""

_CALL = re.compile(r"\s*(\w+)\s*\(\s*(?:(`[^`]+`|\w+)\s*(?:,\s*(\d+)\s*)?)?\)\s*")
FUNCTIONS = ("count", "sum", "mean", "min", "max", "lag")


def join_keys(value: Any) -> Any:
    """The keys of a join: a tuple of common names, or a mapping when a name differs. ValueError for other forms."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        found = dict(zip(value, value, strict=True))
    elif isinstance(value, dict) and all(isinstance(name, str) for pair in value.items() for name in pair):
        found = value
    else:
        raise ValueError(
            f"is neither a list of names nor a mapping of names to names; write {_keys_example(value)}"
        )
    if len(found) < len(value) or len(set(found.values())) < len(found):
        raise ValueError(f"names a key twice: {value}; name each key of both tables once")
    return tuple(found) if all(here == there for here, there in found.items()) else found


def _keys_example(value: Any) -> str:
    """The mapping that a list with mappings in it probably means."""
    pairs: dict[str, str] = {}
    for part in value if isinstance(value, list | tuple) else ():
        inner = part if isinstance(part, dict) else {part: part}
        pairs |= {
            here: there for here, there in inner.items() if isinstance(here, str) and isinstance(there, str)
        }
    if not pairs:
        return "on: [key] when both tables have that name, or on: {name in the main table: name in the joined table}"
    return "on: {" + ", ".join(f"{here}: {there}" for here, there in pairs.items()) + "}"


class AsOfSpec(Section):
    """An as-of join: the newest row of the joined table that is not newer than the row of the main table."""

    column: str
    """The time column of the main table."""
    there: str | None = None
    """The time column of the joined table, when its name differs."""
    within: Duration | None = Field(default=None, gt=0)
    """The largest age of the joined row. An older one counts as missing. By default no limit."""
    strict: bool = False
    """The joined row must be older than the row of the main table, not equally old."""

    @property
    def partner(self) -> str:
        return self.there or self.column


class LookupSpec(Section):
    """How the table of a lookup may change while its version is served (`serin lookups refresh`)."""

    max_age: Duration | None = Field(default=None, gt=0)
    """The time after which the table counts as too old: an alert fires until it is refreshed. By default no limit."""
    max_row_change: float | None = Field(default=0.5, gt=0)
    """The largest allowed relative change of the number of rows at a refresh: 0.5 is half as many more or fewer. `null`
    allows any change."""


class JoinSpec(Section):
    """A table whose columns are added to the main table. At most one of its rows may match."""

    table: str = Field(alias="with")
    """The joined table, one of `data.tables`."""
    on: tuple[str, ...] | dict[str, str] = ()
    """The key columns: a list of names that both tables have, or a mapping where the names differ, such as
    `{l_orderkey: o_orderkey}` (name in the main table: name in the joined table). A single name needs no list."""
    as_of: AsOfSpec | None = None
    """Join by time. The name of a time column is enough."""
    how: Literal["left", "inner"] = "left"
    """`left` keeps rows without a match, `inner` drops and counts them."""
    columns: dict[str, str] = Field(min_length=1)
    """Column of the joined table -> its name in the dataset. A list keeps the names."""
    source: Literal["request", "lookup", "training_only"] = "request"
    """Where the columns come from at serving time: `request` (the client sends them), `lookup` (the table is published
    inside the bundle; one key, left join) or `training_only` (not available, so not a feature)."""
    lookup: LookupSpec | None = Field(default=None, exclude_if=is_empty)
    """With `source: lookup`: how the table may change while the version is served."""

    @field_validator("on", mode="before", json_schema_input_type=tuple[str, ...] | dict[str, str] | str)
    @classmethod
    def _keys_have_one_form(cls, value: Any) -> Any:
        return join_keys(value)

    @field_validator("as_of", mode="before", json_schema_input_type=AsOfSpec | str | None)
    @classmethod
    def _one_time_may_stand_alone(cls, value: Any) -> Any:
        return {"column": value} if isinstance(value, str) else value

    @field_validator("columns", mode="before", json_schema_input_type=dict[str, str] | list[str])
    @classmethod
    def _a_list_keeps_the_names(cls, value: Any) -> Any:
        return {name: name for name in value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _finds_rows_by_something(self) -> Self:
        if not self.on and self.as_of is None:
            raise ValueError(
                "a join needs `on: [key, ...]`, `on: {key here: key there}`, `as_of: time`, or `on` and `as_of`"
            )
        return self

    @model_validator(mode="after")
    def _a_lookup_can_be_served(self) -> Self:
        if self.source != "lookup" and self.lookup is not None:
            raise ValueError("`lookup` is for a join with source: lookup")
        if self.source != "lookup":
            return self
        if self.as_of is not None:
            raise ValueError(
                "an as_of join cannot be source: lookup (the table would have to move on with the time); "
                "use source: request and let the client send the values, or training_only"
            )
        if len(self.on) != 1:
            raise ValueError(
                f"source: lookup takes one key column, not {list(self.here)}; "
                "use source: request and let the client send the values"
            )
        if self.how != "left":
            raise ValueError(
                "source: lookup needs how: left (a request whose key is unknown must still be answered)"
            )
        return self

    @property
    def settings(self) -> LookupSpec:
        """The section `lookup`, or its defaults."""
        return self.lookup or LookupSpec()

    @property
    def here(self) -> tuple[str, ...]:
        """The key columns by their names in the dataset."""
        return tuple(self.on)

    @property
    def there(self) -> tuple[str, ...]:
        """The key columns by their names in the joined table, in the same order."""
        return tuple(self.on.values()) if isinstance(self.on, dict) else self.on


class UniqueSpec(Section):
    """One row for each combination of `by`."""

    by: Annotated[tuple[str, ...], Field(min_length=1), NAMES]
    """The key columns. A single name needs no list."""
    keep: Literal["first", "last"] = "first"
    """Which row to keep, ordered by `data.time`, or by position without it."""


@dataclass(frozen=True, slots=True)
class WindowColumn:
    """One column of a window: a function of a column. `back` is the number of rows of a lag."""

    function: str
    column: str | None
    back: int = 1


class WindowSpec(Section):
    """Columns computed from earlier rows with the same key. Earlier means strictly before the row's own time."""

    by: Annotated[tuple[str, ...], Field(min_length=1), NAMES]
    """The key columns. A single name needs no list."""
    rows: int | None = Field(default=None, ge=1)
    """Use the last this many rows. Without `rows` and `span`, all earlier rows are used."""
    span: Duration | None = Field(default=None, gt=0)
    """Use the rows of this much time before the row."""
    delay: Duration = Field(default=0.0, ge=0)
    """How long it takes until a row is known. Rows newer than this are not used."""
    make: dict[str, str] = Field(min_length=1)
    """Column name -> count(), count(x), sum(x), mean(x), min(x), max(x), lag(x) or lag(x, 2)."""
    source: Literal["request", "online", "training_only"] = "request"
    """Where the columns come from at serving time: the client sends them (`request`), the platform keeps the events and
    computes them (`online`, which needs `span` and `data.events`), or they are not available (`training_only`)."""

    @field_validator("make")
    @classmethod
    def _calls_are_known(cls, make: dict[str, str]) -> dict[str, str]:
        for call in make.values():
            window_column(call)
        return make

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.rows is not None and self.span is not None:
            raise ValueError("a window has `rows` or `span`, not both (neither: all of the past)")
        if self.source == "online" and self.span is None:
            raise ValueError("source: online needs `span`: events older than that are not kept")
        return self

    @property
    def columns(self) -> dict[str, WindowColumn]:
        return {name: window_column(call) for name, call in self.make.items()}


class EventsSpec(Section):
    """What makes a row an event, for windows with `source: online` (docs/how-to/online-windows.md)."""

    id: str
    """The column with the id of the event. An event that comes twice, with equal key, time and id, counts once. A row
    without an id gets nulls and is not counted."""
    arrival: str | None = None
    """The column of the main table with the time at which a row became known. By default rows arrive in the order of
    `data.time`. It is read in training only: at serving time a row arrives when its request does."""
    max_late: Duration = Field(default=3600.0, ge=0)
    """How long after its time a row may arrive. A later one gets nulls and is not counted."""
    max_future: Duration = Field(default=60.0, ge=0)
    """How far the time of a row may lie after its arrival. Beyond that a request is refused."""
    unavailable: Literal["refuse", "nulls"] = "refuse"
    """What happens to requests while the kept events cannot be read: they are refused with status 503, or answered with
    nulls in the window columns. Both are counted."""


def window_column(call: str) -> WindowColumn:
    """What a call such as mean(price) or lag(price, 2) asks for; ValueError with what is wrong."""
    match = _CALL.fullmatch(call)
    if match is None or match[1] not in FUNCTIONS:
        raise ValueError(f"{call!r} is none of count(), sum(x), mean(x), min(x), max(x), lag(x), lag(x, 2)")
    function, column, back = match.groups()
    if column is None and function != "count":
        raise ValueError(f"{call!r} names no column; write {function}(column)")
    if back is not None and (function != "lag" or int(back) < 1):
        raise ValueError(f"{call!r}: only lag takes a number of rows, 1 or more")
    return WindowColumn(function, column.strip("`") if column else None, int(back or 1))
