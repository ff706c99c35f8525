"""What every section of the spec is: frozen, unknown keys refused; and the types that several sections share."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, populate_by_name=True)


def seconds(value: Any) -> Any:
    """'90s', '10m', '1.5h' or a number of seconds -> seconds."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is no duration; write for example 30s, 10m, 1.5h or 90d")
    return float(match[1]) * _SECONDS[match[2]]


def shortest(value: float) -> str:
    """Seconds as they are written in a spec: 600 is '10m'."""
    for unit in ("d", "h", "m", "s"):
        if value >= _SECONDS[unit] and value % _SECONDS[unit] == 0:
            return f"{int(value / _SECONDS[unit])}{unit}"
    return f"{value:g}s"


Duration = Annotated[
    float, BeforeValidator(seconds), PlainSerializer(shortest, return_type=str, when_used="json")
]
"""Seconds in Python, '10m' in YAML."""
