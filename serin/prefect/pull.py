"""The pull step of every deployment: locates the flows on the machine that runs them.

The folder is looked up when a run starts, not stored in the deployment: a checkout, an installed wheel and a container
keep the application folder in different places, and may use the same Prefect server.
"""

from __future__ import annotations

import os

from serin.host.logs import mask_secrets
from serin.machine.environment import application_folder


def enter_application() -> dict[str, str]:
    """Makes flows/ and tasks/ importable and masks secrets in all log records. Prefect reads `directory`."""
    mask_secrets()
    folder = application_folder()
    os.chdir(folder)
    return {"directory": str(folder)}
