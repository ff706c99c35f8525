"""Writes a spec's file with chosen settings; comments, order and everything else stay as they are."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from serin.errors import ExtraMissing, SpecError


def write_chosen(source: Path, settings: Mapping[str, JsonValue], target: Path, *, remark: str) -> None:
    """Writes `target`: `source` with `settings` (by their path in the spec), and `remark` as a comment above."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.comments import CommentedMap, CommentedSeq
    except ImportError as error:
        raise ExtraMissing(package="ruamel.yaml", extra="search") from error
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    document: Any = yaml.load(source.read_text(encoding="utf-8"))
    if not isinstance(document, CommentedMap):
        raise SpecError(where=str(source), problems=[("", "has no keys")])
    for path, value in settings.items():
        *sections, last = path.split(".")
        place = document
        for name in sections:
            if place.get(name) is None:
                place[name] = CommentedMap()
            place = place[name]
        if isinstance(value, list):
            chosen: Any = CommentedSeq(value)
            chosen.fa.set_flow_style()
        else:
            chosen = value
        place[last] = chosen
    text = io.StringIO()
    yaml.dump(document, text)
    target.write_text(f"# {remark}\n{text.getvalue()}", encoding="utf-8")
