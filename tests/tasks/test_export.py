"""How the export's task leases and shows GPUs; the export itself is build's business."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from prefect import flow

from serin.errors import StageStopped
from serin.export import build
from serin.formats.trained import RECORD
from serin.machine.leases import holders
from serin.machine.stopping import check_stopped
from serin.pipeline import export as use_case
from serin.spec.load import load_spec
from serin.store.artifacts import Bundle, Checkpoint, Dataset
from tasks.export import export_model
from tests.fakes.gpus import pretend_gpus
from tests.fakes.small_pipeline import small_spec

DATASET = Dataset(path="/datasets/1", digest="0123abcd", rows={"train": 8, "valid": 1, "test": 1})


class Stopped(Exception):
    """The export has seen enough."""


@pytest.mark.parametrize(
    ("variants", "leased", "shown"), [(["fp32", "tensorrt"], ["GPU-a"], "GPU-a"), (["fp32"], [], "")]
)
def test_an_export_sees_the_gpu_it_has_leased_and_no_other(
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    variants: list[str],
    leased: list[str],
    shown: str | None,
) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-a", "GPU-b"])
    seen: list[tuple[list[str], str | None]] = []

    def look(*_: object, **__: object) -> Bundle:
        seen.append(([holder.device for holder in holders(home)], os.environ.get("CUDA_VISIBLE_DEVICES")))
        raise Stopped

    monkeypatch.setattr(build, "export_model", look)
    monkeypatch.setattr("serin.scoring.session.has_device", lambda device: device == "tensorrt")
    (tmp_path / RECORD).write_text('{"model": {}}')
    spec = load_spec(small_spec(tmp_path / "data", export={"variants": variants}))
    checkpoint = Checkpoint(path=str(tmp_path), step=1, metrics={})
    with pytest.raises(Stopped):
        use_case.export_model(spec, checkpoint, DATASET)
    assert seen == [(leased, shown)]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_cancelled_run_publishes_nothing(
    prefect_server: None, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, cancelled, ended = threading.Event(), threading.Event(), list[str]()

    def export(*_: object, **__: object) -> Bundle:
        began.set()
        cancelled.wait(120)
        try:
            check_stopped()
        except StageStopped as error:
            ended.append(str(error))
            raise
        raise AssertionError("it would publish now")

    monkeypatch.setattr(build, "export_model", export)
    (tmp_path / RECORD).write_text('{"model": {}}')
    spec = load_spec(small_spec(tmp_path / "data"))

    @flow
    async def exporting() -> None:
        checkpoint = Checkpoint(path=str(tmp_path), step=1, metrics={})
        work = asyncio.create_task(export_model(spec, checkpoint, DATASET))
        await asyncio.to_thread(began.wait, 120)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        cancelled.set()

    asyncio.run(exporting())
    assert ["export was stopped" in words for words in ended] == [True]
