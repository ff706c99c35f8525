"""Runs that were sent by content, on workers that see nothing of the machine that sent them but the store."""

import asyncio
import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.pipeline import pipeline
from flows.watch import watch
from serin.machine import environment
from serin.pipeline.pack import pack_spec
from serin.pipeline.run_stage import run_export
from serin.scoring.explain.explainer import Explainer
from serin.spec.load import load_spec, read_spec
from serin.store.artifacts import Release
from serin.store.store import Store
from tasks.versions import sent_version
from tests.fakes.own_project import write_project
from tests.fakes.small_pipeline import NAME

FIRST = Release(model=NAME, version=1)
OWN = ("net", "layers", "ours", "ours.steps", "ours.limits")


@contextmanager
def host(home: Path, store: str, folder: Path) -> Iterator[None]:
    """A process on another host: its own home and working folder, and none of the user's modules imported before."""
    home.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIN_HOME", str(home))
        patch.setenv("SERIN_STORE", store)
        patch.chdir(folder)
        for name in OWN:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        yield


def send(root: Path, home: Path, store: str) -> str:
    """Sends a project from a machine that is then gone with all its files."""
    with host(home, store, root), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        package = pack_spec(read_spec(root / "model" / "spec.yaml"), elsewhere=True)
        package.send()
    shutil.rmtree(root)
    return package.reference


def test_two_machines_that_send_the_same_get_one_dataset_one_training_and_one_version(
    tmp_path: Path, bucket: str, prefect_server: None
) -> None:
    references = set()
    for name in ("ann", "a-long-way/bob"):
        write_project(tmp_path / name, monitoring={"retrain": ["data"]})
        references.add(send(tmp_path / name, tmp_path / f"home-of-{name}", bucket))
    (reference,) = references
    for worker in ("one", "two"):
        with host(tmp_path / worker, bucket, tmp_path):
            assert asyncio.run(pipeline(reference, serve=False)) == FIRST
            found = Store.open()
            assert (len(found.datasets()), found.versions(NAME)) == (1, [1])
            assert sent_version(FIRST) == reference
    assert Path.cwd() != tmp_path
    with host(tmp_path / "two", bucket, tmp_path):
        _is_watched_and_explained()


def _is_watched_and_explained() -> None:
    """By a host that trained nothing: its code and tables are those of the package."""
    store = Store.open()
    store.set_alias(NAME, "live", 1)
    asyncio.run(watch())
    assert not (environment.home() / "watch").exists(), "no table has changed"
    assert Explainer(store.bundle(NAME, 1).path).schema.task == "binary"


def test_what_a_run_on_this_machine_has_made_is_found_by_the_commands_and_the_other_way_round(
    tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_project(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "project")
    with host(tmp_path / "home", "", tmp_path):
        package = pack_spec(read_spec(spec), elsewhere=False)
        package.send()
        assert asyncio.run(pipeline(package.reference, serve=False)) == FIRST
        exported = run_export(load_spec(spec))
        assert (exported.ran, exported.value.version) == (False, 1)
        again = run_export(load_spec(spec), fresh=True)  # which loads the network of the package's training
        assert (again.ran, again.value.version) == (True, 2)
