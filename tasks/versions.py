"""Published versions: their specs, the pages about them in a run, and work that leads to several."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import acreate_markdown_artifact

from serin.errors import NotFound, SerinError
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Release
from serin.store.packages import REFERENCE, package_of, stored_spec
from serin.store.store import Store
from tasks.markdown import table


def find_version(model: str, version: int | str | None = None) -> tuple[Release, PipelineSpec]:
    """Returns a version by number or alias, or the newest, with the spec it was made from."""
    store = Store.open()
    if version is None:
        versions = store.versions(model)
        if not versions:
            raise NotFound(kind="model", name=model, known=store.models())
        version = versions[-1]
    bundle = store.bundle(model, version, hold=True)
    return bundle.release, stored_spec(Path(bundle.path))


def sent_version(release: Release) -> str | dict[str, Any]:
    """What opens the spec of a version again, on any worker: its package, or for one that was made without the spec
    itself."""
    bundle = Path(Store.open().bundle(release.model, release.label, hold=True).path)
    if (package := package_of(bundle)) is not None:
        return f"{REFERENCE}{package}"
    return stored_spec(bundle).model_dump(mode="json", by_alias=True)


def live_models() -> list[str]:
    """Returns every model that has a live version."""
    store = Store.open()
    return [model for model in store.models() if "live" in store.aliases(model)]


async def show_version(release: Release) -> None:
    """Adds two pages to the run: the version beside the one that was live when it was made, and its model card. They
    are there also when the version was found and nothing was exported, and before a rollout begins."""
    store = Store.open()
    await acreate_markdown_artifact(
        key=f"{release.model}-version",
        markdown=_comparison(store, release),
        description=f"Version {release.version} of {release.model} and the live one",
    )
    card = store.read_file(release.model, release.version, "card.md") or b""
    await acreate_markdown_artifact(
        key=f"{release.model}-card",
        markdown=card.decode(),
        description=f"The model card of version {release.version} of {release.model}",
    )


def _comparison(store: Store, release: Release) -> str:
    champion = _facts(store, release, "champion.json")
    live: int | None = champion.get("live_version")
    new = _facts(store, release, "gate.json").get("test_onnx", {})
    earlier = Release(model=release.model, version=live) if live else None
    old = {} if earlier is None else _facts(store, earlier, "gate.json").get("test_onnx", {})
    rows = [(f"{name}, each on its own test rows", value, old.get(name, "")) for name, value in new.items()]
    if same := champion.get("overall"):
        what = f"{champion['metric']}, both on the newest {same['rows']:,} test rows"
        rows.insert(0, (what, same["candidate"], same["live"]))
    columns = ("metric", f"version {release.version}", f"live version {live}")
    shown = 3 if earlier else 2
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row[:shown]] for row in rows]
    by = f", approved by {champion['approved_by']}" if champion.get("approved_by") else ""
    verdict = f"{champion['verdict']}{by}: {champion['reason']}\n" if champion else ""
    metrics = table(columns[:shown], cells) if cells else ""
    return "\n".join([f"# {release.model} version {release.version}\n", metrics, verdict])


def _facts(store: Store, release: Release, name: str) -> dict[str, Any]:
    """A JSON file of a version; empty where it has none."""
    content = store.read_file(release.model, release.version, name)
    found: dict[str, Any] = json.loads(content) if content else {}
    return found


async def all_tried(work: Iterable[Awaitable[Release]]) -> list[Release]:
    """The releases that work on several models has led to. All are tried; the first error is raised at the end."""
    ended = await asyncio.gather(*work, return_exceptions=True)
    errors = [end for end in ended if isinstance(end, BaseException)]
    for error in errors:
        if not isinstance(error, SerinError):
            raise error
        get_run_logger().error("%s", error)
    if errors:
        raise errors[0]
    return [end for end in ended if isinstance(end, Release)]
