"""Checks that served windows equal those of the dataset: its history is replayed event by event."""

from __future__ import annotations

import logging
from pathlib import Path

from serin.errors import GateFailed
from serin.formats.windows import read_windows
from serin.windows.replay import differing

logger = logging.getLogger(__name__)


def check_windows(folder: Path) -> Path:
    """Returns the folder of a dataset. GateFailed when one of its window columns would be served with other bits."""
    plan = read_windows(folder)
    if plan is None:
        return folder
    rows, problem = differing(plan, folder)
    if problem:
        raise GateFailed(stage="windows", what="served windows differ", found=problem)
    logger.info(f"online windows: {rows:,} rows replayed event by event, all equal")
    return folder
