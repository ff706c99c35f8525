"""What scheduled scoring reads and writes: an entry as in `data.tables`, and a target. In text (an argument, a flow's
parameter) a long form is a mapping in braces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError

from serin.errors import SpecError
from serin.spec.section import Location, Section
from serin.spec.tables import Connection, DeltaTable, LongForm, SqlTable, TableSource, located
from serin.spec.yaml_file import read_yaml

Entry = str | Mapping[str, Any]


class ResultTable(Section):
    """A table of a database that scores are written to."""

    table: Annotated[str, Field(min_length=1)]
    """Its name; with its schema it is written `schema.name`."""
    connection: Connection
    """Where the database's URI is kept, as for a query."""


class ResultDelta(Section):
    """A Delta table that scores are written to."""

    delta: Location
    """Path or URL of the table's folder."""


ScoreTarget = str | ResultDelta | ResultTable

_ROWS: TypeAdapter[Any] = TypeAdapter(TableSource)
_TARGET: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        Annotated[Location, Tag("<path>")]
        | Annotated[ResultDelta, Tag("<delta>")]
        | Annotated[ResultTable, Tag("<table>")],
        Discriminator(
            lambda value: "<path>" if isinstance(value, str) else "<delta>" if "delta" in value else "<table>"
        ),
    ]
)


def read_source(given: Entry) -> str | LongForm:
    """Returns what is to be scored, with an absolute path. SpecError with all that is wrong."""
    found: str | LongForm = located(_read(given, _ROWS, "rows"), _absolute)
    if isinstance(found, DeltaTable) and (found.version, found.as_of) != (None, None):
        problem = "leave it out: each run scores what has come since the last one, up to the newest version"
        key = "version" if found.as_of is None else "as_of"
        raise SpecError(where="rows", problems=[(key, problem)])
    return found


def read_target(given: Entry) -> ScoreTarget:
    """Returns where scores go, with an absolute path. SpecError with all that is wrong."""
    found: ScoreTarget = _read(given, _TARGET, "out")
    if isinstance(found, ResultDelta):
        return ResultDelta(delta=_absolute(found.delta))
    if isinstance(found, ResultTable):
        return ResultTable(table=found.table, connection=_located(found.connection))
    return found


def name_of(source: str | LongForm) -> str:
    """What messages call a source. It holds no secret."""
    match source:
        case str():
            return source
        case SqlTable():
            return f"the query of {source.connection}"
        case DeltaTable():
            return source.delta
    return source.path


def _read(given: Entry, adapter: TypeAdapter[Any], where: str) -> Any:
    plain: Any = given
    if isinstance(given, str) and given.lstrip().startswith("{") and given.rstrip().endswith("}"):
        try:
            plain = read_yaml(given)
        except yaml.YAMLError:
            plain = None  # its message would repeat the text, which may hold a URI
        if not isinstance(plain, dict):
            problem = "is not a mapping in YAML, such as {delta: PATH}"
            raise SpecError(where=where, problems=[("", problem)])
    try:
        return adapter.validate_python(plain)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        problems = [(_key(each["loc"]), each["msg"].removeprefix("Value error, ")) for each in found]
        raise SpecError(where=where, problems=problems) from None  # the input may be a URI


def _key(place: tuple[int | str, ...]) -> str:
    return ".".join(str(each) for each in place if not str(each).startswith("<"))


def _located(connection: str) -> str:
    kind, _, where = connection.partition(":")
    return f"file:{_absolute(where)}" if kind == "file" else connection


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).expanduser().absolute())
