"""The way of a piece through a GPU, with arrays that refuse to mix with numpy's. Bits are compared on real ones."""

from contextlib import nullcontext
from pathlib import Path

import distributed
import pytest

from serin.errors import ClusterNotUp, EngineFailed
from serin.etl.engines.cuda_cluster import gpu_cluster
from serin.etl.engines.dask_engine import cuda_cluster
from serin.etl.engines.device import Gpus, host_columns
from serin.etl.engines.engine import choose_engine
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from tests.fakes import cupy
from tests.fakes.awkward_tables import write_awkward_tables, write_awkward_variants
from tests.logs import heard
from tests.unit.etl.flights import digest, spec_of

ONE_GPU = Gpus(count=1, memory_bytes=2**34)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serin.etl.engines.attempts.usable_gpus", lambda: ONE_GPU)
    monkeypatch.setattr("serin.etl.engines.engine.memory_pool", nullcontext)


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
    spec = load_spec(
        {
            "name": "a",
            "data": {"tables": {"t": "t.parquet"}, "target": {"expression": "y", "task": "regression"}},
            "features": [
                {"columns": ["a"], "steps": ["fill_median", "normalize"]},
                {"columns": ["b", "c"], "steps": ["normalize", "tests.fakes.own_operators:Squash"]},
            ],
        }
    )
    assert host_columns(spec.features) == ["b", "c"]


def test_a_gpu_is_chosen_for_much_data_and_several_get_a_cluster() -> None:
    def kind(data_bytes: int, gpus: Gpus) -> str:
        plenty = {"needed_bytes": 10**6, "free_bytes": 10**10}
        return choose_engine(EtlSpec(), data_bytes=data_bytes, gpus=gpus, **plenty).kind

    assert kind(10**6, ONE_GPU) == "process"
    assert kind(10**9, ONE_GPU) == "cuda"
    assert kind(10**9, Gpus(count=2, memory_bytes=2**35)) == "dask-cuda"
    assert kind(10**9, Gpus(count=0, memory_bytes=0)) == "process"


def test_a_gpu_that_is_asked_for_and_not_here_is_refused() -> None:
    with pytest.raises(EngineFailed, match="no GPU"):
        choose_engine(
            EtlSpec(engine="cuda"),
            data_bytes=1,
            needed_bytes=1,
            free_bytes=2,
            gpus=Gpus(count=0, memory_bytes=0),
        )


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
