"""The ETL on a real GPU: the host's bits, from one process and from a cluster. Skipped without one."""

from pathlib import Path

import pytest

from serin.etl.device import usable_gpus
from serin.spec.stages import EtlSpec
from tests.fakes.awkward_tables import write_awkward_tables
from tests.unit.etl.flights import digest

pytest.importorskip("cupy", reason="cupy is not installed")
pytestmark = pytest.mark.skipif(not usable_gpus().count, reason="no GPU")


@pytest.mark.parametrize("rows", [40, 6_000, 300_000])
@pytest.mark.parametrize("piece_rows", [None, 700])
def test_one_gpu_gives_the_bits_of_the_host(tmp_path: Path, rows: int, piece_rows: int | None) -> None:
    spec = write_awkward_tables(tmp_path / "tables", rows)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    assert digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu", piece_rows) == expected


def test_a_cluster_of_gpus_gives_the_bits_of_the_host(tmp_path: Path) -> None:
    pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    spec = write_awkward_tables(tmp_path / "tables", 20_000)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    assert digest(spec, EtlSpec(engine="dask-cuda"), tmp_path / "gpu", 900) == expected
