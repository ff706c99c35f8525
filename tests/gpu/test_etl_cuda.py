"""The ETL on a real GPU: the host's bits, from one process and from a cluster. Skipped without one."""

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serin.etl.engines.dask_engine import DaskEngine
from serin.etl.engines.device import usable_gpus
from serin.machine.hardware import inventory
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from tests.fakes.awkward_tables import write_awkward_tables, write_awkward_variants
from tests.logs import heard
from tests.signals import hit
from tests.unit.etl.flights import digest

pytest.importorskip("cupy", reason="cupy is not installed")
pytestmark = pytest.mark.skipif(not usable_gpus().count, reason="no GPU")


@pytest.mark.parametrize(
    ("rows", "piece_rows"), [(40, None), (40, 1), (6_000, None), (6_000, 700), (300_000, None)]
)
def test_one_gpu_gives_the_bits_of_the_host(tmp_path: Path, rows: int, piece_rows: int | None) -> None:
    spec = write_awkward_tables(tmp_path / "tables", rows)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    assert digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu", piece_rows) == expected


def test_strings_on_one_gpu_give_the_codes_of_the_host(tmp_path: Path) -> None:
    """Few and very many different ones, one, none, of every Arrow type, in files that differ in their types."""
    rows, random = 1_200_000, np.random.default_rng(3)
    numbers = random.integers(0, 2_000_000, rows)
    words = np.asarray(["", " ", "é", "e\u0301", "🐤", "a\0b", "nan", "long " * 40], dtype=object)

    def main(part: slice, text: pa.DataType) -> pa.Table:
        own = numbers[part]
        few = pa.array(words[own % len(words)], mask=own % 11 == 0)
        return pa.table(
            {
                "few": few.cast(text),
                "many": pa.array([f"n{number}" for number in own]).cast(text),
                "one": pa.array(["always"] * len(own)),
                "none": pa.nulls(len(own), pa.string()),
                "coded": few.cast(pa.string()).dictionary_encode(),
                "y": pa.array(own % 3),
            }
        )

    (tmp_path / "main").mkdir()
    halves = (slice(0, rows // 2), pa.string()), (slice(rows // 2, rows), pa.large_string())
    for number, (part, text) in enumerate(halves):
        path = tmp_path / "main" / f"{number}.parquet"
        pq.write_table(main(part, text), path, row_group_size=100_000, use_dictionary=["few", "one"])
    spec = load_spec(
        {
            "name": "texts",
            "data": {
                "tables": {"main": str(tmp_path / "main")},
                "target": {"expression": "y > 0", "task": "binary"},
                "split": {"train": 0.8, "valid": 0.1, "test": 0.1},
                "unique": {"by": ["many", "few"]},
            },
            "features": [
                {"columns": ["few", "many", "one", "coded"], "steps": [{"categorify": {"min_count": 2}}]},
                {"columns": ["none"], "steps": ["count_encode"]},
            ],
            "model": {"kind": "mlp"},
        }
    )
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    said: list[str] = []
    with heard(said.append):
        assert digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu") == expected
        assert digest(spec, EtlSpec(engine="cuda"), tmp_path / "pieces", 150_000) == expected
    assert not any("full" in line or "on the host" in line for line in said), said


def test_a_delta_table_on_one_gpu_gives_the_bits_of_the_host(tmp_path: Path) -> None:
    pytest.importorskip("deltalake", reason="deltalake is not installed")
    from tests.unit.etl.test_delta import rows, spec_over, write

    before = rows(0, 500).drop_columns(["people"])
    write(tmp_path, before, rows(500, 900), partition_by=["zone"], schema_mode="merge")
    spec = spec_over(tmp_path)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    assert digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu", 200) == expected


def test_relational_work_on_one_gpu_gives_the_bits_of_the_host(tmp_path: Path) -> None:
    specs = write_awkward_variants(tmp_path / "tables", 9_000)
    host = {name: digest(spec, EtlSpec(engine="process"), tmp_path / "host") for name, spec in specs.items()}
    gpu = {name: digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu") for name, spec in specs.items()}
    assert gpu == host


def test_a_cluster_of_gpus_gives_the_bits_of_the_host(tmp_path: Path) -> None:
    pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    spec = write_awkward_tables(tmp_path / "tables", 20_000)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    said: list[str] = []
    with heard(said.append):
        assert digest(spec, EtlSpec(engine="dask-cuda"), tmp_path / "gpu", 4_500) == expected
    assert not any("no cluster" in line for line in said), said


@pytest.mark.timeout(400)
def test_two_workers_on_one_gpu_give_the_bits_of_the_host_although_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It proves that work moves to the other worker, not a speed-up."""
    pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    spec = write_awkward_tables(tmp_path / "tables", 20_000)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    real, killed = DaskEngine.reduce, list[int]()

    def reduce(engine: DaskEngine, *arguments: Any) -> Any:
        if not killed:
            pids = sorted(engine._client.run(os.getpid).values())
            assert len(pids) == 2
            killed.append(pids[0])
            hit(pids[0])
        return real(engine, *arguments)

    monkeypatch.setattr(DaskEngine, "reduce", reduce)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inventory()[0].id)
    said: list[str] = []
    with heard(said.append):
        found = digest(spec, EtlSpec(engine="dask-cuda", workers=2), tmp_path / "gpu", 1_500)
    assert found == expected
    assert killed, "no worker was killed"
    assert not any("no cluster" in line for line in said), said


@pytest.mark.parametrize("engine", ["cuda", "dask-cuda"])
def test_subnormal_numbers_are_in_the_interval_and_the_scale_of_the_host(
    tmp_path: Path, engine: Literal["cuda", "dask-cuda"]
) -> None:
    if engine == "dask-cuda":
        pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    random = np.random.default_rng(5)
    tiny = (random.integers(-(2**22), 2**22, 5_000) * 2.0**-149).astype(np.float32)
    columns = {"n": np.arange(5_000), "tiny": tiny, "small": tiny, "late": random.integers(0, 2, 5_000)}
    pq.write_table(pa.table(columns), tmp_path / "main.parquet")
    spec = load_spec(
        {
            "name": "tiny",
            "data": {
                "tables": {"main": str(tmp_path / "main.parquet")},
                "target": {"expression": "late", "task": "binary"},
                "split": {"train": 0.8, "valid": 0.1, "test": 0.1},
            },
            "features": [
                {"columns": ["tiny"], "steps": [{"bucketize": [-1e-40, 0.0, 1e-39]}]},
                {"columns": ["small"], "steps": ["min_max"]},
            ],
            "model": {"kind": "mlp"},
        }
    )
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    assert digest(spec, EtlSpec(engine=engine), tmp_path / "gpu", 1_100) == expected
