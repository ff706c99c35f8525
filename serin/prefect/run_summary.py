"""The last lines of a pipeline's log: how good the new version is, where it answers, and the next commands."""

from __future__ import annotations

from pathlib import Path

from serin.host.state import read_stack
from serin.machine.documents import read_if_any
from serin.store.artifacts import Release
from serin.store.store import Store


def summary(home: Path, release: Release, *, served: bool) -> list[str]:
    """For a version that was published; `served`: it is live now."""
    model, version = release.model, release.version
    folder = Path(Store.open().bundle(model, version).path)
    lines = [
        f"{model} version {version} is {'live' if served else 'published, not served'}",
        *_quality(folder),
    ]
    if not served:
        return [*lines, f"next: serin rollout start {model}:{version}"]
    stack = read_stack(home)
    if stack is not None and stack.is_alive:
        lines.append(f"it answers at {stack.gateway_url}/v2/models/{model}/infer")
    lines.append(f"try it: serin predict {model} ROWS.csv (its columns: serin models show {model})")
    return [*lines, f"next: serin status, serin rollout report {model}"]


def _quality(folder: Path) -> list[str]:
    """The metrics on the test rows, and how they compare with those of the version that was live."""
    gate, champion = read_if_any(folder / "gate.json"), read_if_any(folder / "champion.json")
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(gate.get("test_onnx", {}).items()))
    lines = [f"{metrics} on {gate['test_rows']:,} test rows"] if metrics else []
    if champion.get("live_version") is None:
        return [*lines, "there was no live version to compare it with"] if champion else lines
    compared = "compared" if champion.get("overall") else "not compared"
    approved = f"; approved by {champion['approved_by']}" if champion.get("approved_by") else ""
    return [*lines, f"{compared} with version {champion['live_version']}: {champion['reason']}{approved}"]
