"""Tables and stores at s3:// URLs, against a server that speaks S3."""

import gzip
import sys
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from serin.errors import SourceMissing, SourceUnreadable
from serin.etl.sources.files import find_files
from serin.etl.sources.find import find_table
from serin.spec.pipeline import PipelineSpec
from serin.spec.tables import DeltaTable
from serin.store.bucket import Timing
from serin.store.file_systems import file_system
from serin.store.store import Store
from tests.logs import heard
from tests.unit.etl.trips import build, rates, spec_of, trips, whole


def write(url: str, content: bytes) -> None:
    system, path = file_system(url)
    system.pipe_file(path, content)


def with_tables(folder: Path, **tables: str) -> PipelineSpec:
    return spec_of(
        folder,
        tables=tables,
        joins=[{"with": "rates", "on": "zone", "as_of": {"column": "start", "there": "since"}, "columns": ["rate"],
                "source": "request"}],
        features=[{"columns": ["fare", "rate"], "steps": ["fill_median", "normalize"]},
                  {"columns": ["taxi"], "steps": ["categorify"]}],
    )  # fmt: skip


def test_tables_and_store_in_s3_give_what_local_ones_give(bucket: str, tmp_path: Path) -> None:
    local = with_tables(
        tmp_path, trips=str(tmp_path / "trips.parquet"), rates=str(tmp_path / "rates.parquet")
    )
    expected = build(local, Store(str(tmp_path / "local")))
    frame = trips()
    for name, part in (("a", frame.iloc[:500]), ("b", frame.iloc[500:])):
        write(f"{bucket}/in/{name}.parquet", part.to_parquet(row_group_size=97))
    write(f"{bucket}/rates.csv.gz", gzip.compress(rates().to_csv(index=False).encode()))

    remote = with_tables(tmp_path, trips=f"{bucket}/in/*.parquet", rates=f"{bucket}/rates.csv.gz")
    store = Store(f"{bucket}/store", cache=tmp_path / "cache")
    made = build(remote, store)

    assert made.digest == expected.digest
    assert (whole(made.path)[0] == whole(expected.path)[0]).all()
    said: list[str] = []
    with heard(said.append):
        assert build(remote, store) == made
    assert "is there already" in said[0]


def test_a_delta_table_in_s3_gives_what_a_local_one_gives(bucket: str, tmp_path: Path) -> None:
    for part in (trips().iloc[:500], trips().iloc[500:]):
        rows = pa.Table.from_pandas(part, preserve_index=False)
        deltalake.write_deltalake(tmp_path / "delta", rows, mode="append", partition_by=["zone"])
    for path in (tmp_path / "delta").rglob("*"):
        if path.is_file():
            write(f"{bucket}/{path.relative_to(tmp_path)}", path.read_bytes())
    local, remote = (
        build(spec_of(tmp_path, tables={"trips": {"delta": path}}), Store(str(tmp_path / "store")))
        for path in (str(tmp_path / "delta"), f"{bucket}/delta")
    )
    assert remote.digest == local.digest
    with pytest.raises(SourceMissing, match=f"nothing at {bucket}/none"):
        find_table("trips", DeltaTable(delta=f"{bucket}/none"))


def test_an_object_that_changes_is_another_table(bucket: str) -> None:
    write(f"{bucket}/a.parquet", trips().to_parquet())
    before = find_files("trips", f"{bucket}/a.parquet")
    write(f"{bucket}/a.parquet", trips().iloc[::-1].to_parquet())
    assert find_files("trips", f"{bucket}/a.parquet") != before


def test_what_is_not_there_is_named(bucket: str) -> None:
    with pytest.raises(SourceMissing, match=rf"{bucket}/none\.parquet"):
        find_files("trips", f"{bucket}/none.parquet")


def test_an_endpoint_that_does_not_answer_is_reported_as_such(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("serin.store.bucket.PATIENT", Timing(connect_s=1, read_s=1, attempts=1, patience_s=0))
    with pytest.raises(SourceUnreadable, match=rf"{bucket}/a\.parquet cannot be read: .*sending request"):
        find_files("trips", f"{bucket}/a.parquet")


def test_missing_credentials_are_reported_as_such(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(SourceUnreadable, match="no credentials were found"):
        find_files("trips", f"{bucket}/a.parquet")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceUnreadable, match=r"ocifs.*install that package"):
        find_files("trips", "oci://nobody/x.parquet")
    monkeypatch.setitem(sys.modules, "obstore.fsspec", None)
    with pytest.raises(SourceUnreadable, match=r"obstore.*pip install 'serin\[s3\]'"):
        find_files("trips", "gs://trips/a.parquet")
