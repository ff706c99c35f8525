"""Alerts: open, acknowledged, silenced and resolved ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serin.console.views.view import Parameters
from serin.monitoring.alerts.read import read_alerts


def read_alert_list(home: Path, parameters: Parameters) -> dict[str, Any]:
    del parameters
    return {"alerts": read_alerts(home, resolved=30)}
