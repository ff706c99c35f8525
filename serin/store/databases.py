"""Opens databases through ADBC by references to their URIs: `env:NAME` or `file:PATH`. The URI is never logged, stored
or shown: messages of drivers are cleaned of it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_plus, urlsplit

import pyarrow as pa

from serin.errors import DatabaseFailed, SerinError
from serin.machine import environment

_EXTRA = ("sqlite", "postgresql")  # drivers that serin[sql] installs


@contextmanager
def connected(reference: str, *, write: bool = False) -> Iterator[Any]:
    """Yields a connection of ADBC's DBAPI, in a transaction that is rolled back unless the block commits it.
    DatabaseFailed for all that the driver raises in the block."""
    uri = _uri(reference)
    try:
        with _connect(reference, uri, write=write) as connection:
            yield connection
    except SerinError:
        raise
    except _driver_errors() as error:  # which may hold the URI
        raise _failure(reference, _without_secrets(str(error), uri)) from None


def is_sqlite(reference: str) -> bool:
    return urlsplit(_uri(reference)).scheme == "sqlite"


def quoted(name: str) -> str:
    """A name of a table or a column as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: int | str) -> str:
    """A value as SQL writes it. Databases take a text for the type of the column that it is compared with."""
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def _connect(reference: str, uri: str, *, write: bool) -> Any:
    scheme = {"postgres": "postgresql"}.get(urlsplit(uri).scheme, urlsplit(uri).scheme)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", scheme):
        raise _failure(
            reference, f"{reference} holds no URI such as postgresql://user:password@host/database"
        )
    try:
        driver = importlib.import_module(f"adbc_driver_{scheme}.dbapi")
    except ImportError:
        package = "'serin[sql]'" if scheme in _EXTRA else f"adbc-driver-{scheme}"
        reason = f"the ADBC driver for {scheme} is missing; pip install {package} where tables are read"
        raise _failure(reference, reason) from None
    if scheme != "sqlite":
        return driver.connect(uri)
    path = Path(uri.removeprefix("sqlite:///"))
    if not path.is_file():  # SQLite would make an empty database
        raise _failure(reference, f"{reference} names a database file that does not exist")
    return driver.connect(f"{path.absolute().as_uri()}?mode={'rw' if write else 'ro'}")


def _driver_errors() -> tuple[type[Exception], ...]:
    own = sys.modules.get("adbc_driver_manager")
    return (OSError, ValueError, pa.ArrowException, *([own.Error] if own else []))


def _uri(reference: str) -> str:
    kind, _, where = reference.partition(":")
    if kind == "env":
        uri = environment.text(where) or ""
        problem = f"the environment variable {where} is not set here; set it where tables are read"
    else:
        path = Path(where).expanduser()
        uri = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        problem = f"{where} holds nothing that can be read; put the database's URI there"
    if not uri:
        raise _failure(reference, problem)
    return uri


def _without_secrets(text: str, uri: str) -> str:
    parts = urlsplit(uri)
    options = re.findall(r"(?i)(?:^|&)[^=&]*(?:pass|secret|token)[^=&]*=([^&]*)", parts.query)
    for secret in (uri, *filter(None, (parts.password, *options))):
        for written in (secret, unquote(secret), unquote_plus(secret)):
            text = text.replace(written, "***")
    return text


def _failure(reference: str, reason: str) -> DatabaseFailed:
    return DatabaseFailed(connection=reference, reason=reason)
