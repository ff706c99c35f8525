"""The first pull step of every deployment: where the flows lie on the machine that runs them.

Asked when a run starts, not written down when the deployment is made: a checkout, an installed wheel and a container
keep the application folder in different places, and may serve the same Prefect server.
"""

from __future__ import annotations

from serin.environment import application_folder


def locate_application() -> dict[str, str]:
    """For `prefect.deployments.steps.set_working_directory`, which makes flows/ and tasks/ importable."""
    return {"directory": str(application_folder())}
