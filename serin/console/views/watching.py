"""What is watched: alerts, captures, live quality, drift, and latency with error budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serin.console.views.models import known_model
from serin.console.views.view import Parameters
from serin.monitoring.alerts.read import read_alerts


def read_alert_list(home: Path, parameters: Parameters) -> dict[str, Any]:
    del parameters
    return {"alerts": read_alerts(home, resolved=30)}


def read_quality(home: Path, parameters: Parameters) -> dict[str, Any]:
    model = parameters["model"]
    return {"model": model, "tab": "quality", "state": known_model(home, model), "quality": None}


def read_drift(home: Path, parameters: Parameters) -> dict[str, Any]:
    model = parameters["model"]
    return {"model": model, "tab": "drift", "state": known_model(home, model), "drift": None}


def read_traffic(home: Path, parameters: Parameters) -> dict[str, Any]:
    model = parameters["model"]
    return {"model": model, "tab": "traffic", "state": known_model(home, model), "history": None}
