"""PostgreSQL 15 from Debian: Prefect's migrations need its extension pg_trgm, which the wheel of the tests lacks."""

from pathlib import Path

from tests.cluster.part import Missing, apt_install

PROGRAMS = Path("/usr/lib/postgresql/15/bin")


def install() -> None:
    apt_install("postgresql-15")
    if not (PROGRAMS / "postgres").exists():
        raise Missing(f"Debian's postgresql-15 has no {PROGRAMS}/postgres")
