"""Before anything is collected: tests must not see or touch a developer's own stack, store or Prefect profile."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_STATE = Path(tempfile.mkdtemp(prefix="serin-tests-"))

for _name in [
    name for name in os.environ if name.startswith(("SERIN_", "PREFECT_")) and name != "SERIN_TRITON"
]:
    del os.environ[_name]
os.environ["SERIN_HOME"] = str(_STATE / "serin")
os.environ["PREFECT_HOME"] = str(_STATE / "prefect")
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_STATE, ignore_errors=True)
