"""The list of all views, with their routes."""

from __future__ import annotations

from typing import Final

from serin.console.views import alerts, captures, drift, machines, models, quality, rollouts, traffic
from serin.console.views.view import View

VIEWS: Final = (
    View(
        path="/",
        template="overview",
        title="Models",
        read=models.read_overview,
        section="models",
        every_s=3.0,
    ),
    View(
        path="/rollouts",
        template="rollouts",
        title="Rollouts",
        read=rollouts.read_rollouts,
        section="rollouts",
    ),
    View(path="/alerts", template="alerts", title="Alerts", read=alerts.read_alert_list, section="alerts"),
    View(path="/runs", template="runs", title="Runs", read=machines.read_runs, section="runs", every_s=5.0),
    View(
        path="/runs/{run}",
        template="run",
        title="Run {run}",
        read=machines.read_run,
        section="runs",
        every_s=5.0,
    ),
    View(path="/gpus", template="gpus", title="GPUs", read=machines.read_gpus, section="gpus"),
    View(path="/models/{model}", template="model", title="{model}", read=models.read_model, section="models"),
    View(
        path="/models/{model}/rollout",
        template="rollout",
        title="Rollout of {model}",
        read=rollouts.read_rollout,
        section="models",
        every_s=1.0,
    ),
    View(
        path="/models/{model}/traffic",
        template="traffic",
        title="Traffic of {model}",
        read=traffic.read_traffic,
        section="models",
        every_s=5.0,
        query=("span",),
    ),
    View(
        path="/models/{model}/drift",
        template="drift",
        title="Drift of {model}",
        read=drift.read_drift_watch,
        section="models",
        every_s=10.0,
    ),
    View(
        path="/models/{model}/quality",
        template="quality",
        title="Quality of {model}",
        read=quality.read_live_quality,
        section="models",
        every_s=10.0,
    ),
    View(
        path="/models/{model}/captures",
        template="captures",
        title="Captures of {model}",
        read=captures.read_recorded,
        section="models",
        every_s=5.0,
    ),
)
