"""Prefect's database as a first start leaves it: kept in the user's cache, copied into an empty state.

Migrations and block types take a quarter of a minute of a first start, the deployments another. A database
fits when Python, Prefect and Prefect's collections have the versions that made it. `template.py` makes one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import shutil
import sqlite3
from importlib import metadata
from pathlib import Path

from serin.machine import environment
from serin.machine.durable import write_whole

logger = logging.getLogger(__name__)

_KEPT = 6  # of versions and checkouts that this user has used
_DECIDE = ("prefect", "sqlalchemy", "alembic", "aiosqlite")


def database(home: Path) -> Path:
    """Returns the place of the database: Prefect's default in PREFECT_HOME."""
    return home / "prefect" / "prefect.db"


def template_folder() -> Path:
    return environment.cache_folder() / "prefect"


def installation_key() -> str:
    """Returns a digest of what decides the tables and the block types of a new database."""
    found = {"python": platform.python_version()}
    for name in _DECIDE:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    for entry in metadata.entry_points(group="prefect.collections"):
        if entry.dist is not None:
            found[f"{entry.dist.name}:{entry.name}"] = entry.dist.version
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:20]


def template_file(deployments: str | None = None) -> Path:
    """Returns the place of the template with the deployments of this digest; None: of one without deployments."""
    name = installation_key() if deployments is None else f"{installation_key()}-{deployments[:20]}"
    return template_folder() / f"{name}.db"


def copy_template(home: Path, deployments: str) -> str | None:
    """Copies the template that fits into an empty state: 'whole' with these deployments, 'empty' without any; None when
    there is none or a database is there already."""
    target = database(home)
    if target.exists():
        return None
    for kind, template in (("whole", template_file(deployments)), ("empty", template_file())):
        try:
            if revision(template) is None:
                continue
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch = target.with_name("prefect.db.new")
            shutil.copyfile(template, scratch)
            scratch.chmod(0o600)
            scratch.replace(target)
            note_prepared(home)
            return kind
        except OSError as error:
            logger.info(f"{template} cannot be used: {error}")
    return None


def note_prepared(home: Path) -> None:
    """Notes that a server of this installation has prepared the database."""
    noted = {"installation": installation_key(), "revision": revision(database(home))}
    write_whole(_note(home), json.dumps(noted))


def is_prepared(home: Path) -> bool:
    """Returns whether the database is what a server of this installation would make of it at its start."""
    try:
        noted = json.loads(_note(home).read_text())
    except (OSError, ValueError):
        return False
    found = revision(database(home))
    return found is not None and noted == {"installation": installation_key(), "revision": found}


def revision(file: Path) -> str | None:
    """Returns the last migration that was applied, as Alembic records it; None when there is no usable database."""
    if not file.is_file():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)) as opened:
            rows = opened.execute("SELECT version_num FROM alembic_version").fetchall()
    except sqlite3.Error:
        return None
    return str(rows[0][0]) if len(rows) == 1 else None


def keep_newest() -> None:
    """Removes the templates of installations that were not used for long."""
    files = sorted(template_folder().glob("*.db"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_KEPT:]:
        file.unlink(missing_ok=True)


def _note(home: Path) -> Path:
    return home / "prefect" / "prepared.json"
