"""Reads a user's Envoy settings and merges them with Serin's. Pure: validate.py asks Envoy whether it accepts them.

A YAML or JSON file with two keys, both optional. `bootstrap` is merged into the start-up document: mappings key by key,
lists by appending; Serin's own values cannot be changed. `http_filters` are inserted between the key check and the
buffer that waits for the body.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from serin.errors import EnvoyFileUnfit

Document = dict[str, Any]


class ExpertSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap: Document = {}
    http_filters: list[Document] = []


def read_expert(path: Path) -> ExpertSettings:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return ExpertSettings.model_validate(content if content is not None else {})
    except OSError as error:
        raise EnvoyFileUnfit(path=path, reason=str(error.strerror)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EnvoyFileUnfit(path=path, reason=f"it is not valid YAML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        reason = f"{where}: {first['msg']}; it may hold `bootstrap` (a mapping) and `http_filters` (a list)"
        raise EnvoyFileUnfit(path=path, reason=reason) from error


def merge(ours: Document, theirs: Document, path: Path, at: str = "bootstrap") -> Document:
    """`ours` with `theirs` added. EnvoyFileUnfit when that would change what the gateway relies on."""
    merged = dict(ours)
    for key, value in theirs.items():
        place = f"{at}.{key}"
        if key not in ours:
            merged[key] = value
        elif isinstance(ours[key], dict) and isinstance(value, dict):
            merged[key] = merge(ours[key], value, path, place)
        elif isinstance(ours[key], list) and isinstance(value, list):
            merged[key] = [*ours[key], *_new(ours[key], value, path, place)]
        else:
            raise EnvoyFileUnfit(path=path, reason=f"{place} is set by the gateway and cannot be changed")
    return merged


def _new(ours: list[Any], theirs: list[Any], path: Path, at: str) -> list[Any]:
    taken = {entry.get("name") for entry in ours if isinstance(entry, dict)}
    for entry in theirs:
        if isinstance(entry, dict) and entry.get("name") in taken and entry.get("name") is not None:
            raise EnvoyFileUnfit(
                path=path, reason=f"{at} has one named {entry['name']!r} already; choose another name"
            )
    return theirs
