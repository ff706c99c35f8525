"""The pull step of every deployment: where the flows lie on the machine that runs them.

Asked when a run starts, not written down when the deployment is made: a checkout, an installed wheel and a container
keep the application folder in different places, and may serve the same Prefect server.
"""

from __future__ import annotations

import os

from serin.machine.environment import application_folder
from serin.stack.host.logs import mask_secrets


def enter_application() -> dict[str, str]:
    """From here on flows/ and tasks/ can be imported, and no log record holds a secret. Prefect reads `directory`."""
    mask_secrets()
    folder = application_folder()
    os.chdir(folder)
    return {"directory": str(folder)}
