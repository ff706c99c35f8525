"""A published version to its clients."""

from __future__ import annotations

from prefect import flow

from serin.artifacts import Release
from tasks.roll_out import roll_out_release
from tasks.versions import find_version


@flow(name="roll_out", persist_result=True, result_serializer="json")
async def roll_out(model: str, version: int | None = None) -> Release:
    """A version (the newest, when none is named) rolled out as its own spec says, followed to the end."""
    release, spec = find_version(model, version)
    return await roll_out_release(spec.serving, spec.rollout, release)
