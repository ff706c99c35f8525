"""Serin's contender: the training loop of every rank with DDP. Only its steps are timed."""

from __future__ import annotations

from typing import Any

from benchmarks.parallel.ranks import lap as lap_of_all
from benchmarks.training.ours import train
from serin.training.parallel.ranks import Ranks


def run(request: dict[str, Any]) -> dict[str, Any]:
    return lap_of_all("benchmarks.parallel.ours", request)


def lap(request: dict[str, Any], world: Ranks) -> dict[str, Any]:
    return train(request, world)
