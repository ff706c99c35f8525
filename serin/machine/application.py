"""Where the application beside the core is: flows, tasks, deployments and Triton models."""

from __future__ import annotations

from pathlib import Path


def application_folder() -> Path:
    """What holds flows/, tasks/, deployments/ and triton_models/: serin/app in a wheel, else the checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "app"
    return inside if inside.is_dir() else package.parent
