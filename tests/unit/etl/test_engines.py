"""The same dataset, bit for bit, from every engine, number of workers and cut into pieces."""

from pathlib import Path

import pytest

from serin.errors import EngineFailed, JoinNotManyToOne, SpecError, TargetUnusable
from serin.etl.engines import dask_engine
from serin.etl.engines.dask_engine import DaskEngine, local_cluster
from serin.etl.engines.device import Gpus
from serin.etl.engines.engine import Choice, choose_engine, open_engine
from serin.etl.engines.process_engine import ProcessEngine
from serin.spec.etl import EtlSpec
from tests.unit.etl.flights import digest, spec_of


@pytest.fixture(scope="module")
def expected(few_flights: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest(spec_of(few_flights), EtlSpec(engine="process", workers=1), tmp_path_factory.mktemp("one"))


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
    with local_cluster(workers, closed=False) as client:
        spilled = client.run(lambda dask_worker: dask_worker.local_directory)
        spilled |= client.run(lambda dask_worker: dask_worker.local_directory, nanny=True)
        for folder in map(Path, spilled.values()):
            assert any(above.stat().st_mode & 0o077 == 0 for above in folder.parents), "closed to other users"
        etl = EtlSpec(engine=client.scheduler.address)
        assert digest(spec_of(few_flights), etl, tmp_path / "right", piece_rows) == expected
        wrong = spec_of(few_flights, target={"expression": "flight > -1", "task": "binary"})
        with pytest.raises(TargetUnusable, match="one class only"):  # an error of a worker keeps its type
            digest(wrong, etl, tmp_path / "wrong", piece_rows)


def test_small_data_needs_no_cluster_and_large_data_gets_one() -> None:
    def chosen(needed_bytes: int) -> Choice:
        none = Gpus(count=0, memory_bytes=0)
        return choose_engine(
            EtlSpec(), data_bytes=10**9, needed_bytes=needed_bytes, free_bytes=10**9, gpus=none
        )

    small, large = chosen(10**8), chosen(10**10)
    assert (small.kind, small.keep) == ("process", True)
    assert (large.kind, large.keep) == ("dask", False)
    assert "10,000 MB for the pieces, 1,000 MB free" in large.why


def test_a_named_scheduler_replaces_a_cluster_of_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERIN_DASK", "tls://nodes:8786")
    none = Gpus(count=0, memory_bytes=0)

    def kind(engine: str, needed_bytes: int) -> str:
        etl = EtlSpec(engine=engine)
        return choose_engine(etl, data_bytes=1, needed_bytes=needed_bytes, free_bytes=10**9, gpus=none).kind

    assert kind("auto", 10**8) == kind("process", 10**10) == "process"
    assert kind("auto", 10**10) == kind("dask", 1) == "tls://nodes:8786"
    monkeypatch.setenv("SERIN_DASK", "nodes")
    with pytest.raises(SpecError, match="'nodes' is not an address"):
        kind("dask", 1)


def test_a_scheduler_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("serin.etl.engines.dask_engine.CONNECT_S", 0.5)
    choice = Choice(kind="tcp://127.0.0.1:9", workers=1, keep=True, why="")
    with (
        pytest.raises(EngineFailed, match=r"tcp://127\.0\.0\.1:9.*no scheduler answers"),
        open_engine(choice, tmp_path),
    ):
        pass


def test_a_dask_worker_that_dies_while_it_is_started_is_worth_another_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies(**_: object) -> None:
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr(dask_engine, "_LocalCluster", dies)
    with pytest.raises(EngineFailed, match="a worker died while it was started") as failure, local_cluster(1):
        pass
    assert failure.value.retryable


def test_process_engine_ends_its_work_when_a_piece_fails() -> None:
    def fail(item: int) -> int:
        raise JoinNotManyToOne(table="t", on=["k"], key=str(item), matches=2)

    with ProcessEngine(2) as engine, pytest.raises(JoinNotManyToOne):
        engine.hold(fail, [1, 2, 3])


def test_dask_engine_is_an_engine_of_the_same_shape() -> None:
    public = {name for name in vars(ProcessEngine) if not name.startswith("_")}
    assert public <= {name for name in vars(DaskEngine) if not name.startswith("_")}
