"""What the stack's Prefect server keeps in its database, as Prefect reads the settings."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from prefect.settings import Settings

from serin.stack.prefect.processes import prefect_server

_ABOUT = ("PREFECT_SERVER_EVENTS_", "PREFECT_SERVER_SERVICES_")


def _settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in prefect_server(home, 4200).environment.items():
        if name.startswith(_ABOUT):
            monkeypatch.setenv(name, value)
    return Settings()


def test_events_are_kept_for_a_day_and_runs_for_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _settings(tmp_path, monkeypatch).server
    vacuum = server.services.db_vacuum
    assert server.events.retention_period == timedelta(days=1)
    assert {"events", "flow_runs"} <= vacuum.enabled_vacuum_types
    assert vacuum.retention_period == timedelta(days=30)
    assert server.services.event_persister.batch_size == 200


def test_the_caller_decides_how_long_runs_and_events_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD", "7776000")
    monkeypatch.setenv("PREFECT_SERVER_EVENTS_RETENTION_PERIOD", "P7D")
    server = _settings(tmp_path, monkeypatch).server
    assert server.services.db_vacuum.retention_period == timedelta(days=90)
    assert server.events.retention_period == timedelta(days=7)
