"""Dataclasses as JSON documents: pydantic checks what is read against the types of their fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import TypeAdapter

T = TypeVar("T")

_EMPTY: tuple[Any, ...] = (None, (), [], {})
_WRONG = (TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


class Document:
    """The base of dataclasses that are kept as JSON objects, with `format` and `version` first where `form` is given.

    A field that is not known is refused, one that is absent gets its default. Those that `omit` names are left out
    while they are empty.

        @dataclass(frozen=True, slots=True, kw_only=True)
        class Leader(Document, form="serin.leader", version=1):
            holder: str
            term: int
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    _form: ClassVar[tuple[str, int] | None] = None
    _omit: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(
        cls, *, form: str | None = None, version: int = 1, omit: tuple[str, ...] = ()
    ) -> None:
        if form is not None:  # a dataclass with slots is made twice, the second time without these words
            cls._form = form, version
        cls._omit = omit or cls._omit

    def to_json(self) -> dict[str, Any]:
        head = {} if self._form is None else {"format": self._form[0], "version": self._form[1]}
        return {**head, **value2json(self)}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Raises ValueError with what is wrong."""
        return json2value(cls, document if cls._form is None else checked(document, *cls._form))

    def dump(self) -> bytes:
        return json.dumps(self.to_json()).encode()

    @classmethod
    def load(cls, content: bytes | str) -> Self:
        """Raises ValueError for anything that `dump` does not write."""
        try:
            return cls.from_json(json.loads(content))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error

    @classmethod
    def load_file(cls, path: Path) -> Self | None:
        """The document in a file; None when there is none, or when it is damaged or of another form."""
        try:
            return cls.load(path.read_bytes())
        except (OSError, ValueError):
            return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        def shortened(plain: dict[str, Any]) -> dict[str, Any]:
            return {
                name: value for name, value in plain.items() if name not in cls._omit or value not in _EMPTY
            }

        return _reshaped(handler(source), lambda plain: plain, shortened) if cls._omit else handler(source)


class Row(Document):
    """The base of dataclasses whose JSON is the list of their fields' values."""

    __slots__ = ()

    def to_json(self) -> Any:
        return value2json(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        names = [field.name for field in fields(cast("Any", cls))]
        return _reshaped(
            handler(source),
            lambda row: row if isinstance(row, cls) else dict(zip(names, row, strict=True)),
            lambda plain: list(plain.values()),
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """Annotates a field whose JSON is what `dump` makes of it; `load` takes that back."""

    load: Callable[[Any], Any]
    dump: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        written = core_schema.plain_serializer_function_ser_schema(self.dump)
        return core_schema.no_info_plain_validator_function(self.load, serialization=written)


def checked(document: Any, form: str, version: int) -> dict[str, Any]:
    """Returns the content of a document of this format and version, else raises ValueError."""
    found: dict[str, Any] = dict(document) if isinstance(document, dict) else {}
    if (found.pop("format", None), found.pop("version", None)) != (form, version):
        raise ValueError(f"not a {form} document of version {version}")
    return found


def json2value(kind: type[T], value: Any) -> T:
    """Returns plain values as a value of this type, such as a dataclass. Raises ValueError with what is wrong."""
    from pydantic import ValidationError

    try:
        return cast("T", _adapter(cast("Any", kind)).validate_python(value))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = "".join(f"{place}: " for place in first["loc"])
        found = f", not {first['input']!r}"[:80] if isinstance(first["input"], str | int | float) else ""
        raise ValueError(f"{where}{first['msg'].removeprefix('Value error, ')}{found}") from error
    except _WRONG as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def value2json(value: Any) -> Any:
    """Returns a dataclass as plain values, for `json.dumps`."""
    return _plain(_adapter(cast("Any", type(value))).dump_python(value, warnings=False))


def _plain(value: Any) -> Any:
    """As it comes back from JSON, so that the two can be compared."""
    if isinstance(value, dict):
        return {str(key) if isinstance(key, int) else key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Made when it is first needed: each takes some milliseconds."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _reshaped(schema: Any, load: Callable[[Any], Any], dump: Callable[[Any], Any]) -> Any:
    """The schema of a dataclass with another JSON. It takes over the name by which pydantic finds the type."""
    from pydantic_core import core_schema

    def serialize(value: Any, inner: Callable[[Any], Any]) -> Any:
        return dump(inner(value))

    plain = dict(schema)
    name = plain.pop("ref")
    written = core_schema.wrap_serializer_function_ser_schema(serialize, schema=plain)
    return core_schema.no_info_before_validator_function(load, plain, serialization=written, ref=name)
