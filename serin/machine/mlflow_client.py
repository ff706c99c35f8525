"""MLflow's client, where MLFLOW_TRACKING_URI names a server. MLflow is imported only then: it takes seconds."""

from __future__ import annotations

import importlib.util
from typing import Any

from serin.errors import ExtraMissing
from serin.machine import environment

Client = Any  # mlflow's own, which brings no types
_ONE_TRY = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}


def mlflow_uri() -> str | None:
    """Returns the server's address; None where none is configured. Raises ExtraMissing without MLflow's client."""
    uri = environment.text("MLFLOW_TRACKING_URI")
    if uri is not None and importlib.util.find_spec("mlflow") is None:
        raise ExtraMissing(package="mlflow-skinny", extra="mlflow")
    return uri


def open_client(uri: str) -> Client:
    """Returns the client of a server that has answered. One that is away fails within seconds, so that nothing waits
    for it; later calls are repeated for up to a minute, by default for several."""
    environment.prefer("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    environment.prefer("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    environment.prefer("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    environment.prefer("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    with environment.having(_ONE_TRY):
        client.search_experiments(max_results=1)
    return client


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
