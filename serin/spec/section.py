"""The base class of every section of the spec, and the types that several sections share."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def names(value: Any) -> Any:
    """A single name is accepted where a list is expected."""
    return (value,) if isinstance(value, str) else value


def is_empty(value: object) -> bool:
    """For `exclude_if`: a key that was added later and is not in use leaves the digests of older specs as they are."""
    return not value


class Section(BaseModel):
    """A frozen part of the spec that refuses unknown keys. The docstring below a field documents its key."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )
    summary: ClassVar[str] = ""
    """The class's own docstring, without the list of its keys."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Adds the keys to the class's docstring, so that `help()` shows them."""
        super().__pydantic_init_subclass__(**kwargs)
        cls.summary = inspect.cleandoc(cls.__doc__ or "")
        keys = [
            f"    {field.alias or name}: {' '.join(field.description.split())}"
            for name, field in cls.model_fields.items()
            if field.description
        ]
        cls.__doc__ = "\n\n".join(part for part in (cls.summary, "\n".join(["Keys:", *keys])) if part)


def seconds(value: Any) -> Any:
    """'90s', '10m', '1.5h' or a number of seconds -> seconds."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(
            f"{value!r} is not a valid duration: use a number and a unit, such as 30s, 10m, 1.5h or 90d"
        )
    return float(match[1]) * _SECONDS[match[2]]


def shortest(value: float) -> str:
    """Seconds as they are written in a spec: 600 is '10m'."""
    for unit in ("d", "h", "m", "s"):
        if value >= _SECONDS[unit] and value % _SECONDS[unit] == 0:
            return f"{int(value / _SECONDS[unit])}{unit}"
    return f"{value:g}s"


_WRITTEN_DURATION = Annotated[
    float | str,
    WithJsonSchema(
        {
            "anyOf": [{"type": "number"}, {"type": "string", "pattern": rf"^\s*{_DURATION.pattern}\s*$"}],
            "examples": ["30s", "10m", "1.5h", "90d"],
        }
    ),
]
Duration = Annotated[
    float,
    BeforeValidator(seconds, json_schema_input_type=_WRITTEN_DURATION),
    PlainSerializer(shortest, return_type=str, when_used="json"),
]
"""Seconds in Python, '10m' in YAML."""
