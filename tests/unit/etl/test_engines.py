"""The same dataset, bit for bit, from every engine, number of workers and cut into pieces."""

from pathlib import Path

import pytest

from serin.errors import EngineFailed, JoinNotManyToOne, TargetUnusable
from serin.etl.build import build_dataset
from serin.etl.dask_engine import DaskEngine, local_cluster
from serin.etl.engine import open_engine
from serin.etl.process_engine import ProcessEngine
from serin.spec.pipeline import PipelineSpec
from serin.spec.stages import EtlSpec
from serin.store import Store
from tests.unit.etl.flights import spec_of


def digest(spec: PipelineSpec, etl: EtlSpec, folder: Path, piece_rows: int | None) -> str:
    store = Store(str(folder))
    return build_dataset(spec.data, spec.features, etl, store=store, piece_rows=piece_rows).digest


@pytest.fixture(scope="module")
def expected(few_flights: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest(
        spec_of(few_flights), EtlSpec(engine="process", workers=1), tmp_path_factory.mktemp("one"), None
    )


@pytest.mark.parametrize(("workers", "piece_rows"), [(1, 1), (2, 3000), (3, 10**9)])
def test_threads_and_cuts_do_not_show(
    few_flights: Path, expected: str, tmp_path: Path, workers: int, piece_rows: int
) -> None:
    etl = EtlSpec(engine="process", workers=workers)
    assert digest(spec_of(few_flights), etl, tmp_path, piece_rows) == expected


@pytest.mark.parametrize(("workers", "piece_rows"), [(1, 10**9), (2, 1)])
def test_dask_workers_do_not_show(
    few_flights: Path, expected: str, tmp_path: Path, workers: int, piece_rows: int
) -> None:
    with local_cluster(workers) as client:
        etl = EtlSpec(engine=client.scheduler.address)
        assert digest(spec_of(few_flights), etl, tmp_path / "right", piece_rows) == expected
        wrong = spec_of(few_flights, target={"expression": "flight > -1", "task": "binary"})
        with pytest.raises(TargetUnusable, match="one class only"):  # an error of a worker keeps its type
            digest(wrong, etl, tmp_path / "wrong", piece_rows)


def test_pieces_may_be_read_again_instead_of_kept(
    few_flights: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "serin.etl.engine.ProcessEngine", lambda workers, keep: ProcessEngine(workers, keep=False)
    )
    assert digest(spec_of(few_flights), EtlSpec(engine="process", workers=2), tmp_path, 4000) == expected


def test_small_data_needs_no_cluster() -> None:
    with open_engine(EtlSpec(), needed_bytes=1000) as engine:
        assert isinstance(engine, ProcessEngine)


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serin.etl.dask_engine.CONNECT_S", 0.5)
    with (
        pytest.raises(EngineFailed, match=r"tcp://127\.0\.0\.1:9.*no scheduler answers"),
        open_engine(EtlSpec(engine="tcp://127.0.0.1:9"), needed_bytes=1000),
    ):
        pass


def test_process_engine_ends_its_work_when_a_piece_fails() -> None:
    def fail(item: int) -> int:
        raise JoinNotManyToOne(table="t", on=["k"], key=str(item), matches=2)

    with ProcessEngine(2) as engine, pytest.raises(JoinNotManyToOne):
        engine.hold(fail, [1, 2, 3])


def test_dask_engine_is_an_engine_of_the_same_shape() -> None:
    public = {name for name in vars(ProcessEngine) if not name.startswith("_")}
    assert public <= {name for name in vars(DaskEngine) if not name.startswith("_")}
