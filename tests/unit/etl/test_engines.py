"""The same dataset, bit for bit, from every engine and cut; the way of a piece through a GPU."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import distributed
import numpy as np
import pytest
from blake3 import blake3

from serin.columns.column import Column, any_true, count_true, tally
from serin.errors import ClusterNotUp, EngineFailed, JoinNotManyToOne, SpecError, TargetUnusable
from serin.etl.build import build_dataset
from serin.etl.engines.attempts import Choice, choose_engine, open_engine
from serin.etl.engines.cuda_cluster import gpu_cluster
from serin.etl.engines.dask_engine import cuda_cluster
from serin.etl.engines.device import (
    Gpus,
    HostColumns,
    OnGpu,
    free_gpu_bytes,
    gpu_aware,
    host_columns,
    store_rows,
    take_rescues,
    to_gpu,
    to_host,
)
from serin.etl.engines.engine import ProcessEngine
from serin.etl.kernels import compile_kernels
from serin.etl.relational.gpu import gpu_batches
from serin.etl.relational.relation import Related
from serin.etl.sources.tables import Piece
from serin.formats.dataset import SourceFile
from serin.formats.shards import PART_ROWS, Rows, write_rows
from serin.machine import dask_cluster, environment
from serin.machine.dask_cluster import local_cluster
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.spec.load import load_spec
from serin.spec.steps.operators import operators
from serin.store.artifacts import Dataset
from serin.store.store import Store
from tests.fakes import cupy
from tests.fakes.awkward_tables import write_awkward_tables, write_awkward_variants
from tests.logs import heard
from tests.unit.etl.flights import digest, spec_of
from tests.unit.etl.trips import table_spec


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


NO_GPU, ONE_GPU = Gpus(count=0, memory_bytes=0), Gpus(count=1, memory_bytes=2**34)


def chosen(
    engine: str = "auto", *, data_bytes: int = 10**9, needed_bytes: int = 1, gpus: Gpus = NO_GPU
) -> Choice:
    etl = EtlSpec(engine=engine)
    return choose_engine(etl, data_bytes=data_bytes, needed_bytes=needed_bytes, free_bytes=10**9, gpus=gpus)


def test_small_data_needs_no_cluster_and_large_data_gets_one() -> None:
    small, large = chosen(needed_bytes=10**8), chosen(needed_bytes=10**10)
    assert (small.kind, small.keep) == ("process", True)
    assert (large.kind, large.keep) == ("dask", False)
    assert "10,000 MB for the pieces, 1,000 MB free" in large.why


def test_a_named_scheduler_replaces_a_cluster_of_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERIN_DASK", "tls://nodes:8786")
    assert chosen(needed_bytes=10**8).kind == chosen("process", needed_bytes=10**10).kind == "process"
    assert chosen(needed_bytes=10**10).kind == chosen("dask").kind == "tls://nodes:8786"
    monkeypatch.setenv("SERIN_DASK", "nodes")
    with pytest.raises(SpecError, match="'nodes' is not an address"):
        chosen("dask")


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

    monkeypatch.setattr(dask_cluster, "_LocalCluster", dies)
    with pytest.raises(EngineFailed, match="a worker died while it was started") as failure, local_cluster(1):
        pass
    assert failure.value.retryable


def test_process_engine_ends_its_work_when_a_piece_fails() -> None:
    def fail(item: int) -> int:
        raise JoinNotManyToOne(table="t", on=["k"], key=str(item), matches=2)

    with ProcessEngine(2) as engine, pytest.raises(JoinNotManyToOne):
        engine.hold(fail, [1, 2, 3])


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serin.etl.engines.attempts.usable_gpus", lambda: ONE_GPU)
    monkeypatch.setattr("serin.etl.engines.attempts.memory_pool", nullcontext)


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_gives_what_the_host_gives(
    few_flights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = cupy.install(monkeypatch)
    said: list[str] = []
    expected = digest(spec_of(few_flights), EtlSpec(engine="process"), tmp_path / "host")
    with heard(said.append):
        assert digest(spec_of(few_flights), EtlSpec(engine="cuda"), tmp_path / "gpu", 3000) == expected
    assert module.uploads > 40
    assert not any("full" in line for line in said)


@pytest.mark.usefixtures("one_gpu")
def test_awkward_values_go_through_a_gpu_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_awkward_tables(tmp_path / "tables", 3000)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    cupy.install(monkeypatch)
    assert digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu", 700) == expected


@pytest.mark.usefixtures("one_gpu")
def test_every_kind_of_relational_work_goes_through_a_gpu_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = write_awkward_variants(tmp_path / "tables", 900)
    host = {name: digest(spec, EtlSpec(engine="process"), tmp_path / "host") for name, spec in specs.items()}
    cupy.install(monkeypatch)
    gpu = {name: digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu", 400) for name, spec in specs.items()}
    assert gpu == host


@pytest.mark.usefixtures("one_gpu")
def test_every_step_is_among_those_whose_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy.install(monkeypatch)
    used: set[str] = set()

    def build(data: DataSpec, features: Sequence[FeatureSpec], etl: EtlSpec, *, store: Store) -> Dataset:
        used.update(step.label for feature in features for step in feature.steps)
        return build_dataset(data, features, etl, store=store)

    monkeypatch.setattr("serin.etl.kernels.build_dataset", build)
    compile_kernels()
    assert used == set(operators())


def test_kernels_are_compiled_for_a_gpu_only() -> None:
    with pytest.raises(EngineFailed, match="no GPU"):
        compile_kernels()


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("full_at", [1, 30, 60])
def test_when_the_gpu_is_full_the_host_continues_and_the_log_says_why(
    few_flights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: int
) -> None:
    expected = digest(spec_of(few_flights), EtlSpec(engine="process"), tmp_path / "host")
    cupy.install(monkeypatch, full_at=full_at)
    said: list[str] = []
    with heard(said.append):
        assert digest(spec_of(few_flights), EtlSpec(engine="cuda"), tmp_path / "gpu", 3000) == expected
    assert any("the GPU was full" in line or "memory ran out" in line for line in said)


@pytest.mark.usefixtures("one_gpu")
def test_several_targets_go_through_a_gpu_unchanged(
    few_flights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = spec_of(few_flights).model_dump(mode="json", by_alias=True)
    late = {"late": "arr_delay > 15", "early": "arr_delay < -10"}
    given["data"]["target"] = {"expressions": late, "task": "binary"}
    spec = load_spec(given)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    cupy.install(monkeypatch)
    assert digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu", 3000) == expected
    assert expected != digest(spec_of(few_flights), EtlSpec(engine="process"), tmp_path / "one")


def test_the_columns_of_steps_that_only_the_host_knows_are_named() -> None:
    there = {"columns": ["a"], "steps": ["fill_median", "normalize"]}
    here = {"columns": ["b", "c"], "steps": ["normalize", "tests.fakes.own_operators:Squash"]}
    assert host_columns(table_spec("t.parquet", "y", there, here).features) == ["b", "c"]


def test_a_gpu_is_chosen_for_much_data_and_several_get_a_cluster() -> None:
    assert chosen(data_bytes=10**6, gpus=ONE_GPU).kind == "process"
    assert chosen(gpus=ONE_GPU).kind == "cuda"
    assert chosen(gpus=Gpus(count=2, memory_bytes=2**35)).kind == "dask-cuda"
    assert chosen().kind == "process"


def test_a_gpu_that_is_asked_for_and_not_here_is_refused() -> None:
    with pytest.raises(EngineFailed, match="no GPU"):
        chosen("cuda")


@pytest.mark.usefixtures("one_gpu")
def test_a_cluster_of_gpus_that_does_not_start_is_reported_and_one_gpu_continues(
    few_flights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest(spec_of(few_flights), EtlSpec(engine="process"), tmp_path / "host")
    cupy.install(monkeypatch)
    said: list[str] = []
    spec = spec_of(few_flights)
    with heard(said.append):
        assert digest(spec, EtlSpec(engine="dask-cuda"), tmp_path / "gpu") == expected
    told = "\n".join(said)
    assert "no cluster of GPUs came up; its process ended with code 1" in told
    assert "dask_cuda" in told  # is not installed here
    assert "continuing with one GPU" in told


def test_a_cluster_that_takes_too_long_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterNotUp, match="not up after 0 s"),
        gpu_cluster(1, tmp_path / "cluster", start_s=0),
    ):
        pass


FAKE_DASK_CUDA = """
from distributed import LocalCluster

class LocalCUDACluster(LocalCluster):
    cuda_visible_devices = [0]

    def __init__(self, rmm_async, rmm_allocator_external_lib_list, **options):
        super().__init__(**options)
"""


def test_a_cluster_of_gpus_accepts_only_its_own_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask's own cluster in the place of dask-cuda's, which is made from it."""
    (tmp_path / "dask_cuda.py").write_text(FAKE_DASK_CUDA)
    monkeypatch.syspath_prepend(tmp_path)
    with cuda_cluster(1, tmp_path) as client:
        address = client.scheduler.address
        assert address.startswith("tls://127.0.0.1:")
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        for stranger in (
            {"address": address.replace("tls://", "tcp://")},
            {"address": address, "security": distributed.Security.temporary()},
        ):
            with pytest.raises((OSError, TimeoutError)):
                distributed.Client(**stranger, timeout=1, set_as_default=False)
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"PRIVATE KEY" in content for content in kept)


@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_a_gpu_that_cupy_cannot_use_is_reported_and_only_auto_continues_without_it(
    few_flights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr("serin.etl.engines.attempts.usable_gpus", lambda: ONE_GPU)
    monkeypatch.setattr("serin.spec.etl.WORTH_BYTES", 1)
    cupy.install(monkeypatch).cuda.runtime.memGetInfo = _no_driver
    said: list[str] = []
    if engine == "auto":
        with heard(said.append):
            digest(spec_of(few_flights), EtlSpec(engine=engine), tmp_path / "store")
        assert any("cupy cannot use the GPU" in line and "continuing without it" in line for line in said)
    else:
        with pytest.raises(EngineFailed, match="CUDA driver version is insufficient"):
            digest(spec_of(few_flights), EtlSpec(engine=engine), tmp_path / "store")


def _no_driver() -> None:
    raise RuntimeError("CUDA driver version is insufficient")


def piece(first_row: int, rows: int, file: str = "a") -> Piece:
    source = SourceFile(table="t", path=file, size=1, modified="")
    return Piece(file=source, groups=(0,), first_row=first_row, rows=rows)


def test_pieces_of_several_files_are_bundled_in_order_up_to_the_limit() -> None:
    pieces = [piece(0, 4), piece(4, 4, "b"), piece(8, 3, "c"), piece(11, 20, "d"), piece(31, 1, "d")]
    found = [(each.first_row, each.rows) for each in gpu_batches(pieces, 8)]
    assert found == [(0, 8), (8, 3), (11, 20), (31, 1)]  # a piece is never cut


def test_a_piece_goes_to_a_gpu_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.install(monkeypatch)
    column = Column(kind="int", values=np.asarray([3, 1, 2]))
    there = to_gpu(Related(columns={"a": column}, rows=np.arange(3), dropped={"filtered": 1}))
    assert isinstance(there.rows, cupy.Array)
    assert isinstance(there.columns["a"].values, cupy.Array)
    back = to_host(there)
    assert isinstance(back.columns, HostColumns)  # each comes when it is asked for
    assert back.columns["a"].values.tolist() == [3, 1, 2]
    assert back.rows.tolist() == [0, 1, 2]
    assert back.dropped == {"filtered": 1}


def test_the_host_does_what_a_full_gpu_cannot_and_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.install(monkeypatch)

    @gpu_aware
    def total(related: Related) -> int:
        there = isinstance(related.rows, cupy.Array)
        if there:
            raise MemoryError("full")
        return int(related.rows.sum())

    take_rescues()
    assert OnGpu(total)(to_gpu(Related(columns={}, rows=np.arange(4), dropped={}))) == 6
    assert take_rescues() == 1
    assert take_rescues() == 0


def test_a_dataset_takes_no_more_of_a_gpu_than_was_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.install(monkeypatch)
    whole = free_gpu_bytes()
    with environment.showing_devices(("GPU-a",), 2**30):
        assert free_gpu_bytes() == 2**30
        with environment.showing_devices(("GPU-a",), 2**31):  # a smaller limit stays
            assert free_gpu_bytes() == 2**30
        with ProcessEngine(2, gpu=True) as engine:
            assert engine.budget_bytes <= 2**28  # half of it, for each of two threads
    assert free_gpu_bytes() == whole
    monkeypatch.setenv("SERIN_GPU_MEMORY", "8GB")
    with pytest.raises(SpecError, match="SERIN_GPU_MEMORY"):
        free_gpu_bytes()


def test_counts_on_a_gpu_are_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    module = cupy.install(monkeypatch)
    codes = np.random.default_rng(0).integers(0, 9, 1000).astype(np.uint32)
    weights = codes.astype(np.float64) ** 2
    there = module.asarray(codes)
    assert tally(there, 12).get().tolist() == np.bincount(codes, minlength=12).tolist()
    assert (
        tally(there, 12, module.asarray(weights)).get().tolist() == np.bincount(codes, weights, 12).tolist()
    )
    assert count_true(there == 3) == np.count_nonzero(codes == 3)
    assert any_true(there == 3)
    assert not any_true(there == 11)


@pytest.mark.parametrize("start", [0, PART_ROWS - 7])
def test_rows_leave_a_gpu_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    module = cupy.install(monkeypatch)
    monkeypatch.setattr("serin.etl.engines.device._STAGE_BYTES", 64)  # several copies for each file
    random = np.random.default_rng(1)
    rows = Rows(
        num=random.normal(size=(50, 3)).astype(np.float32),
        cat=random.integers(0, 9, (50, 0)).astype(np.int32),
        target=random.random(50).astype(np.float32),
        rows=np.arange(50),
    )
    there = Rows(**{name: module.asarray(getattr(rows, name)) for name in ("num", "cat", "target", "rows")})
    write_rows(tmp_path / "host", start, rows)
    digests = store_rows([(tmp_path / "gpu", start, there)], digested=("num.f32", "rows.i64"))
    files = sorted(path.relative_to(tmp_path / "host") for path in (tmp_path / "host").rglob("*.*"))
    assert len(files) == (8 if start else 4)
    for file in files:
        assert (tmp_path / "gpu" / file).read_bytes() == (tmp_path / "host" / file).read_bytes()
    last = tmp_path / "gpu" / files[-1].parent  # the only part that begins with one of these rows
    wanted = {name: (last / name).read_bytes() for name in ("num.f32", "rows.i64")}
    assert digests == {
        last / name: (len(content), blake3(content).digest()) for name, content in wanted.items()
    }
