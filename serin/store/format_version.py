"""Refuses stored documents of another format version: the specs inside them have other keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from serin.errors import FormatOutdated

BUNDLE_FORMAT: Final = "serin.bundle"
BUNDLE_VERSION: Final = 2  # 2: the keys of the spec were renamed
EXPORT_AGAIN: Final = "export the model again (`serin export SPEC`)"


def check_version(document: Any, *, path: Path, form: str, version: int, advice: str) -> None:
    """FormatOutdated for a document of this form that another version of Serin wrote. Others pass unseen."""
    if isinstance(document, dict) and document.get("format") == form and document.get("version") != version:
        found = document.get("version")
        raise FormatOutdated(path=str(path), form=form, found=found, expected=version, advice=advice)
