"""The base class of every section of the spec, and the types that several sections share."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d)")
_PER_SECOND = {"us": 1e6, "ms": 1e3}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_BYTES = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_LOGIN = re.compile(r"([a-z0-9+.-]*)://([^/\s]*)@", re.IGNORECASE)


NAMES = BeforeValidator(
    lambda value: (value,) if isinstance(value, str) else value, json_schema_input_type=tuple[str, ...] | str
)
"""For a tuple of names: a single name is accepted where a list is expected."""


def _at_least_one(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{value} is too small; give at least 1, or auto")
    return value


CountOrAuto = Annotated[int | Literal["auto"], AfterValidator(_at_least_one)]


def is_empty(value: object) -> bool:
    """For `exclude_if`: a key that was added later and is not in use leaves the digests of older specs as they are."""
    return not value


def holds_password(text: str) -> bool:
    """Whether a URL in the text holds a password or, as those of HTTP do, a token as the user. `${NAME}`, which uv
    replaces by the variable, is neither."""
    for scheme, login in _LOGIN.findall(text):
        user, _, password = login.partition(":")
        secret = password or (user if "http" in scheme.lower() else "")
        if secret and not re.fullmatch(r"\$\{\w+\}", secret):
            return True
    return False


def _without_password(place: str) -> str:
    if holds_password(place):
        raise ValueError(
            "the URL holds a password or a token, which would be stored and logged: leave it out, and give the "
            "credentials to the workers in their environment"
        )
    return place


Location = Annotated[str, AfterValidator(_without_password)]
"""A path or URL without a password."""


class Section(BaseModel):
    """A frozen part of the spec that refuses unknown keys. The docstring below a field documents its key."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        populate_by_name=True,
    )
    summary: ClassVar[str] = ""
    """The class's own docstring, without the list of its keys."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Adds the keys to the class's docstring, so that `help()` shows them."""
        super().__pydantic_init_subclass__(**kwargs)
        cls.summary = inspect.cleandoc(cls.__doc__ or "")
        cls.__doc__ = _WithKeys()  # type: ignore[assignment]


class _WithKeys:
    """A section's docstring with its keys, made when it is read: to read the source takes longer than the import."""

    def __get__(self, _: object, section: type[Section]) -> str:
        described = key_descriptions(section)
        keys = [
            f"    {field.alias or name}: {described[name]}"
            for name, field in section.model_fields.items()
            if name in described
        ]
        return "\n\n".join(part for part in (section.summary, "\n".join(["Keys:", *keys])) if part)


def key_descriptions(section: type[Section]) -> dict[str, str]:
    """What the docstrings below the fields of a section say, by field. (pydantic's `use_attribute_docstrings` would
    read them in every process, which takes 0.2 s.)"""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, Section) and kind is not Section:
            found |= _below_fields(kind.__module__).get(kind.__qualname__, {})
    return found


@cache
def _below_fields(module: str) -> dict[str, dict[str, str]]:
    """By class of a module and field: `inspect.getsource` of a class would parse its whole module for each."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # operators that were made without a file
        return {}
    found: dict[str, dict[str, str]] = {}
    for kind in tree.body:
        if not isinstance(kind, ast.ClassDef):
            continue
        texts = found[kind.name] = {}
        for field, below in pairwise(kind.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    return found


def seconds(value: Any) -> Any:
    """'90s', '10m', '1.5h' or a number of seconds -> seconds."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(
            f"{value!r} is not a valid duration: use a number and a unit, such as 30s, 10m, 1.5h or 90d"
        )
    number, unit = float(match[1]), match[2]
    return number / _PER_SECOND[unit] if unit in _PER_SECOND else number * _SECONDS[unit]


def shortest(value: float) -> str:
    """Seconds as they are written in a spec: 600 is '10m'."""
    for unit in ("d", "h", "m", "s"):
        if value >= _SECONDS[unit] and value % _SECONDS[unit] == 0:
            return f"{int(value / _SECONDS[unit])}{unit}"
    if 0 < value < 1:
        unit = "ms" if value >= 1e-3 else "us"
        return f"{value * _PER_SECOND[unit]:g}{unit}"
    return f"{value:g}s"


def size_bytes(value: Any) -> Any:
    """'64KiB', '1.5GB' or a number of bytes -> bytes."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(
            f"{value!r} is not a valid size: use a number and a unit, such as 64KiB, 500MB or 10GB"
        )
    return round(float(match[1]) * _BYTES[match[2]])


def size_text(value: int) -> str:
    """Bytes as they are written in a spec: 10_000_000_000 is '10GB'."""
    unit = max((unit for unit, size in _BYTES.items() if value % size == 0), key=lambda unit: _BYTES[unit])
    return f"{value // _BYTES[unit]}{unit}"


def _written(pattern: re.Pattern[str], *examples: str) -> Any:
    forms = [{"type": "number"}, {"type": "string", "pattern": rf"^\s*{pattern.pattern}\s*$"}]
    return Annotated[float | str, WithJsonSchema({"anyOf": forms, "examples": list(examples)})]


Duration = Annotated[
    float,
    BeforeValidator(seconds, json_schema_input_type=_written(_DURATION, "30s", "10m", "1.5h", "90d")),
    PlainSerializer(shortest, return_type=str, when_used="json"),
]
"""Seconds in Python, '10m' in YAML."""
Size = Annotated[
    int,
    BeforeValidator(size_bytes, json_schema_input_type=_written(_SIZE, "64KiB", "500MB", "10GB")),
    PlainSerializer(size_text, return_type=str, when_used="json"),
]
"""Bytes in Python, '10GB' in YAML."""
