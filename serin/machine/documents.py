"""Reads Serin's own JSON files. One that is damaged is named, with the way out, and left as it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from serin.errors import BundleBroken, FileBroken

T = TypeVar("T")

UNFIT: Final = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)

_known: dict[Path, str] = {}


def read_json(path: Path, parse: Callable[[Any], T], *, advice: str) -> T | None:
    """Returns what `parse` makes of a JSON file; None when there is none.

    Raises FileBroken when it cannot be read, is not JSON, or `parse` raises what wrong content makes it raise.
    """
    try:
        return parse_json(path, path.read_bytes(), parse, advice=advice)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise FileBroken(path=path, problem=error.strerror or str(error), advice=advice) from error


def parse_json(path: Path | str, content: bytes, parse: Callable[[Any], T], *, advice: str) -> T:
    """Does the same for content that was read elsewhere."""
    try:
        return parse(json.loads(content))
    except UNFIT as error:
        problem = f"it has {len(content)} bytes and is damaged: {type(error).__name__}: {error}"
        raise FileBroken(path=path, problem=problem if content else "it is empty", advice=advice) from error


def read_facts(path: Path, parse: Callable[[Any], T]) -> T:
    """Returns what `parse` makes of a JSON file of a bundle or a dataset. Raises BundleBroken otherwise."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, *UNFIT) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error


def read_if_any(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file that may be absent or damaged; empty then."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def write_facts(path: Path, document: Mapping[str, Any]) -> None:
    """Writes such a file, for programs and people."""
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def warn_once(log: logging.Logger, error: FileBroken) -> None:
    """Reports a damaged file that its reader can do without, once for each kind of damage."""
    if _known.get(Path(error.path)) != str(error):
        _known[Path(error.path)] = str(error)
        log.warning("%s", error)


def canonical(document: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """The document as JSON with sorted keys and no spaces. `default` converts values that JSON does not know."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), default=default).encode()
