"""Nothing stays on the card: after `serin down`, after kill -9 of each holder, after 20 releases. Skipped, with the
reason, where there is no GPU or no Triton with ONNX Runtime's CUDA provider.

The stack of the last test starts while the others run: before its first pipeline it holds nothing of the card."""

import gc
import importlib.util
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from serin.export.take_over import import_bundle
from serin.host.wiring import build_releases
from serin.machine.hardware import inventory
from serin.serving.triton.releases import Releases
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.whole_stack import Stack, until
from tests.fakes.small_pipeline import small_spec, write_spec
from tests.gpu.card_memory import free_bytes, until_returned
from tests.gpu.holders import holder
from tests.gpu.parts import why_no_release
from tests.signals import hit
from tests.unit.export.small_dataset import make_trained
from tests.unit.training.runs import is_alive

_WHY = why_no_release()
pytestmark = [pytest.mark.skipif(bool(_WHY), reason=_WHY), pytest.mark.alone]

RELEASES = 20
_MANY_FIT_BYTES = 40 << 30  # of a card on which ten releases fit at once


@pytest.fixture(scope="module", autouse=True)
def starting(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Stack, subprocess.Popen[str]] | None]:
    """A stack, and the command that starts it; None without Prefect."""
    if importlib.util.find_spec("prefect") is None:
        yield None
        return
    stack = Stack(tmp_path_factory.mktemp("stack") / "home", gpus=None)
    process = stack.start("up")
    try:
        yield stack, process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        stack.kill()


@pytest.fixture
def gpu() -> str:
    """The first GPU, with nothing of this process on it that could still be freed."""
    gc.collect()
    torch.cuda.empty_cache()
    return inventory()[0].id


@pytest.mark.timeout(400)
def test_twenty_releases_leave_nothing(gpu: str, tmp_path: Path) -> None:
    at_once = 10 if inventory()[0].memory_bytes >= _MANY_FIT_BYTES else 4
    store, host = Store(str(tmp_path / "store")), ChildHost()
    trained = make_trained(tmp_path / "work", "binary", export={"target": "gpu"}, serving={"device": "gpu"})
    bundle = trained.export(store)
    while len(store.versions(bundle.model)) < at_once:
        import_bundle(Path(bundle.path), store)
    gc.collect()
    torch.cuda.empty_cache()
    releases = Releases(tmp_path / "releases", host=host, store=store)
    names = [Release(model=bundle.model, version=version) for version in store.versions(bundle.model)]
    before = free_bytes(gpu)
    try:
        for number in range(RELEASES // at_once):
            for release in names:
                releases.start(release)
            for release in names:
                wait_for(
                    release.name, lambda one=release: releases.state(one) == "ready", host, release.name  # type: ignore[misc]
                )  # fmt: skip
            print(f"round {number}: {len(names)} releases hold {(before - free_bytes(gpu)) >> 20} MB")
            assert before - free_bytes(gpu) > 0
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(releases.stop, names))
            until_returned(gpu, before)
    finally:
        host.stop_all()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_kill_9_of_a_training_leaves_nothing(gpu: str, tmp_path: Path, victim: str) -> None:
    before = free_bytes(gpu)
    with holder("train", tmp_path / "train", gpu) as process:
        workers = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert workers
        assert before - free_bytes(gpu) > 0
        hit(process.pid if victim == "launcher" else workers[0])
        until_returned(gpu, before)
        assert not any(map(is_alive, workers))


@pytest.mark.timeout(300)
def test_kill_9_of_an_etl_leaves_nothing_of_its_workers(gpu: str, tmp_path: Path) -> None:
    pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    before = free_bytes(gpu)
    with holder("etl", tmp_path / "etl", gpu) as process:
        held = before - free_bytes(gpu)
        assert held > 1 << 30, "two workers with half a gigabyte each"
        workers = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        hit(process.pid)
        until_returned(gpu, before)
        until(lambda: not any(map(is_alive, workers)), "no worker lives", within_s=60)


@pytest.mark.timeout(400)
def test_kill_9_of_triton_and_serin_down_leave_nothing(
    gpu: str, starting: tuple[Stack, subprocess.Popen[str]] | None, tmp_path: Path
) -> None:
    if starting is None:
        pytest.skip("Prefect is not installed")
    stack, up = starting
    said = up.communicate(timeout=300)[0]
    assert up.returncode == 0, said
    before = free_bytes(gpu)
    spec = small_spec(
        tmp_path / "data",
        rows=20_000,
        training={"epochs": 1, "batch_rows": 512, "processes": 1},
        export={"target": "gpu"},
        objectives={"latency_ms": 500},
        serving={"device": "gpu"},
    )
    stack.serin("run", str(write_spec(tmp_path, spec)))
    (release,) = _releases(stack)
    until_returned(gpu, before, but_bytes=release["reserved_bytes"])  # the stages hold nothing any more
    held = before - free_bytes(gpu)
    assert held > 0, "the release is on the GPU"
    first = release["pid"]
    children = [child.pid for child in psutil.Process(first).children(recursive=True)]
    hit(first)
    until(lambda: _another(stack, first), "the release is started again", within_s=120)
    until(lambda: not any(map(is_alive, (first, *children))), "nothing of the old process lives", within_s=60)
    until_returned(gpu, before, but_bytes=held)
    assert "did not stop" not in stack.serin("down")
    until_returned(gpu, before)


def _releases(stack: Stack) -> list[dict[str, int]]:
    return [release for device in stack.ask("gpus")["devices"] for release in device["releases"]]


def _another(stack: Stack, first: int) -> bool:
    """Another process serves, and it answers."""
    served = [release["pid"] for release in _releases(stack)]
    releases = build_releases(stack.home, Store(str(stack.home / "store")))
    ready = [releases.state(release) for release in releases.running()]
    return bool(served) and first not in served and ready == ["ready"]
