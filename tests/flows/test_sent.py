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
from serin.formats.bundle import read_manifest
from serin.pipeline.pack import pack_spec
from serin.spec.load import read_spec
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.fakes.own_project import write_project
from tests.fakes.small_pipeline import NAME

FIRST = Release(model=NAME, version=1)
OWN = ("net", "layers", "ours", "ours.steps")


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
    """Sends a project of its own machine, which is then gone with all its files."""
    with host(home, store, root), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        package = pack_spec(read_spec(root / "model" / "spec.yaml"), elsewhere=True)
        package.send()
    shutil.rmtree(root)
    return package.reference


@pytest.fixture
def store(bucket: str) -> str:
    return bucket


def test_two_machines_that_send_the_same_get_one_dataset_one_training_and_one_version(
    tmp_path: Path, store: str, prefect_server: None
) -> None:
    references = set()
    for name in ("ann", "a-long-way/bob"):
        write_project(tmp_path / name)
        references.add(send(tmp_path / name, tmp_path / f"home-of-{name}", store))
    (reference,) = references
    for worker in ("one", "two"):
        with host(tmp_path / worker, store, tmp_path):
            assert asyncio.run(pipeline(reference, serve=False)) == FIRST
            found = Store.open()
            assert (len(found.datasets()), found.versions(NAME)) == (1, [1])
            lineage = read_manifest(Path(found.bundle(NAME, 1).path)).lineage
            assert f"package:{lineage['package']}" == reference
    assert Path.cwd() != tmp_path
    assert "layers" not in sys.modules or not str(sys.modules["layers"].__file__).startswith(
        str(tmp_path / "ann")
    )
