"""Tables and stores at s3:// URLs, against a server that speaks S3."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from serin.errors import SourceMissing, SourceUnreadable
from serin.etl.sources.files import find_files
from serin.etl.sources.find import find_table
from serin.spec.pipeline import PipelineSpec
from serin.spec.tables import DeltaTable
from serin.store.store import Store
from tests.logs import heard
from tests.unit.etl.trips import build, rates, spec_of, trips, whole


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An S3 file system as the environment describes it, with an empty bucket."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", server),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")),
        ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("trips")
    yield system
    system.rm("trips", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def with_tables(folder: Path, **tables: str) -> PipelineSpec:
    return spec_of(
        folder,
        tables=tables,
        joins=[{"with": "rates", "on": "zone", "as_of": {"column": "start", "there": "since"}, "columns": ["rate"],
                "source": "request"}],
        features=[{"columns": ["fare", "rate"], "steps": ["fill_median", "normalize"]},
                  {"columns": ["taxi"], "steps": ["categorify"]}],
    )  # fmt: skip


def test_tables_and_store_in_s3_give_what_local_ones_give(bucket: Any, tmp_path: Path) -> None:
    local = with_tables(
        tmp_path, trips=str(tmp_path / "trips.parquet"), rates=str(tmp_path / "rates.parquet")
    )
    expected = build(local, Store(str(tmp_path / "local")))
    frame = trips()
    for name, part in (("a", frame.iloc[:500]), ("b", frame.iloc[500:])):
        with bucket.open(f"trips/in/{name}.parquet", "wb") as file:
            part.to_parquet(file, row_group_size=97)
    with bucket.open("trips/rates.csv.gz", "wb") as file:
        rates().to_csv(file, index=False, compression="gzip")

    remote = with_tables(tmp_path, trips="s3://trips/in/*.parquet", rates="s3://trips/rates.csv.gz")
    store = Store("s3://trips/store", cache=tmp_path / "cache")
    made = build(remote, store)

    assert made.digest == expected.digest
    assert (whole(made.path)[0] == whole(expected.path)[0]).all()
    said: list[str] = []
    with heard(said.append):
        assert build(remote, store) == made
    assert "is there already" in said[0]


def test_a_delta_table_in_s3_gives_what_a_local_one_gives(bucket: Any, tmp_path: Path) -> None:
    for part in (trips().iloc[:500], trips().iloc[500:]):
        rows = pa.Table.from_pandas(part, preserve_index=False)
        deltalake.write_deltalake(tmp_path / "delta", rows, mode="append", partition_by=["zone"])
    bucket.put(str(tmp_path / "delta"), "trips/delta", recursive=True)
    local, remote = (
        build(spec_of(tmp_path, tables={"trips": {"delta": path}}), Store(str(tmp_path / "store")))
        for path in (str(tmp_path / "delta"), "s3://trips/delta")
    )
    assert remote.digest == local.digest
    with pytest.raises(SourceMissing, match="nothing at s3://trips/none"):
        find_table("trips", DeltaTable(delta="s3://trips/none"))


def test_an_object_that_changes_is_another_table(bucket: Any, tmp_path: Path) -> None:
    with bucket.open("trips/a.parquet", "wb") as file:
        trips().to_parquet(file)
    before = find_files("trips", "s3://trips/a.parquet")
    with bucket.open("trips/a.parquet", "wb") as file:
        trips().iloc[::-1].to_parquet(file)
    bucket.invalidate_cache()
    assert find_files("trips", "s3://trips/a.parquet") != before


def test_what_is_not_there_is_named(bucket: Any) -> None:
    with pytest.raises(SourceMissing, match=r"s3://trips/none\.parquet"):
        find_files("trips", "s3://trips/none.parquet")


def test_an_endpoint_that_does_not_answer_is_reported_as_such(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(SourceUnreadable, match=r"s3://trips/a\.parquet cannot be read: .*connect"):
        find_files("trips", "s3://trips/a.parquet")


def test_missing_credentials_are_reported_as_such(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(SourceUnreadable, match="credentials"):
        find_files("trips", "s3://trips/a.parquet")


@pytest.mark.parametrize(
    ("url", "says"),
    [("gs://nobody/x.parquet", "gcsfs.*install that package"), ("abfs://nobody/x.parquet", "adlfs")],
)
def test_a_package_that_is_missing_is_named(url: str, says: str) -> None:
    with pytest.raises(SourceUnreadable, match=says):
        find_files("trips", url)


def test_the_extra_for_s3_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(SourceUnreadable, match=r"pip install 'serin\[s3\]'"):
        find_files("trips", "s3://trips/a.parquet")
