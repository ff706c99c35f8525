"""Run folders: where one run of a pipeline keeps its spec, its training and its receipts. Always local."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from pathlib import Path

from serin.errors import NameInvalid, NotFound
from serin.private import make_private

_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")


def new_run_id() -> str:
    """Sorts by time, never the same twice: 20261115-093000-1f9c2a."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def run_folder(home: Path, run: str, *, create: bool = False) -> Path:
    if not _RUN.fullmatch(run):
        raise NameInvalid(kind="run", name=run, rule="small letters, digits and '-', at most 80 characters")
    folder = home / "runs" / run
    if create:
        make_private(home)
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.is_dir():
        raise NotFound(kind="run", name=run, known=runs(home))
    return folder


def runs(home: Path) -> list[str]:
    """Newest last."""
    folder = home / "runs"
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
