"""The programs of a release's pod: a replica that answers its golden rows wrongly is not ready, and says why."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serin.cluster.kubernetes import release_pod
from serin.errors import ReleaseNotReady
from serin.formats.bundle import read_golden
from serin.formats.wire import Array
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.fakes.kserve import KServe, serving
from tests.unit.serving import bundles
from tests.unit.serving.test_releases import INSTALL

V1 = Release(model=bundles.MODEL, version=1)
Answer = Callable[[float], None]


@pytest.fixture
def server() -> Iterator[KServe]:
    with serving(model=bundles.MODEL) as running:
        yield running


@pytest.fixture
def answer(server: KServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """A pod whose init container has run. The result sets how far its server's scores are from the golden ones."""
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(release_pod, "HTTP_PORT", server.server_port)
    for name in ("LOG", "REASON"):
        monkeypatch.setattr(release_pod, name, tmp_path / name)
    (tmp_path / "backends" / "python").mkdir(parents=True)
    install = replace(INSTALL, backends=tmp_path / "backends")
    monkeypatch.setattr("serin.serving.triton.releases.find_triton", lambda: install)
    bundle = bundles.publish(Store.open(), bias=0.0)
    run("prepare", monkeypatch)
    golden = read_golden(Path(bundle.path)).outputs["score"]

    def set_to(by: float) -> None:
        def predict(
            _: str, __: str, rows: dict[str, Array], *___: object, **____: object
        ) -> dict[str, Array]:
            return {"score": np.resize(golden, (len(rows["temp"]), 1)) + np.float32(by)}

        monkeypatch.setattr("serin.serving.triton.verify.predict", predict)

    return set_to


def run(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["release_pod", step, V1.name])
    release_pod.main()


def test_a_replica_is_ready_when_it_answers_its_golden_rows_and_says_why_it_is_not(
    server: KServe, answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(0.0)
    run("verify", monkeypatch)
    assert server.asked > 0, "it waits until a row is scored"
    assert not (tmp_path / "REASON").exists()
    answer(0.25)
    with pytest.raises(SystemExit, match=r"delays-v1: .*rows differ in 'score'") as ended:
        run("verify", monkeypatch)
    assert (tmp_path / "REASON").read_text() == (tmp_path / "LOG").read_text() == f"{ended.value.code}\n"


def test_a_replica_that_never_loads_its_model_is_not_waited_for_without_end(
    server: KServe, answer: Answer, tmp_path: Path
) -> None:
    answer(0.0)
    server.ready = False
    with pytest.raises(ReleaseNotReady, match="it scored no row within 0 s"):
        release_pod.verify(V1, tmp_path / "home" / "releases", loads_s=0.0)
