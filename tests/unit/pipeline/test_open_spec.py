"""The parameter `spec` of the flows: every form it takes, and what a wrong one says."""

from pathlib import Path

import pytest
import yaml

from serin.errors import EngineFailed, PackageRefused, SerinError, SpecError
from serin.etl.engines import dask_engine
from serin.pipeline.open_spec import copy_package, opened_spec, sent_spec
from serin.pipeline.pack import pack_spec
from serin.pipeline.run_stage import run_etl
from serin.spec.load import read_spec
from serin.store.file_systems import file_system
from serin.store.packages import manifest_of, publish_package
from serin.store.store import Store
from tests.fakes.own_project import write_project
from tests.fakes.small_pipeline import small_spec


@pytest.fixture
def plain(tmp_path: Path, home: Path) -> Path:
    """A spec without own code, beside its table."""
    document = small_spec(tmp_path / "plain", rows=50)
    document["data"]["tables"] = {"parcels": "parcels.parquet"}
    path = tmp_path / "plain" / "spec.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def tables(source: object) -> dict[str, object]:
    with opened_spec(source) as spec:  # type: ignore[arg-type]
        return dict(spec.data.tables)


def test_a_path_and_a_folder_of_the_worker(plain: Path) -> None:
    expected = {"parcels": str(plain.parent / "parcels.parquet")}
    assert tables(str(plain)) == tables(str(plain.parent)) == expected


def test_the_spec_itself_with_absolute_paths_or_urls(plain: Path) -> None:
    document = yaml.safe_load(plain.read_text())
    for place in ("/mnt/parcels.parquet", "s3://bucket/parcels.parquet"):
        document["data"]["tables"] = {"parcels": place}
        assert tables(document) == {"parcels": place}


def test_a_url_whose_tables_are_beside_it(plain: Path, bucket: str) -> None:
    url = f"{bucket}/specs/late.yaml"
    system, path = file_system(url)
    system.pipe_file(path, plain.read_bytes())
    assert tables(url) == {"parcels": f"{bucket}/specs/parcels.parquet"}


def test_a_package_is_opened_where_its_files_are_and_leaves_nothing_changed(plain: Path) -> None:
    package = pack_spec(read_spec(plain), elsewhere=True)
    package.send()
    before = Path.cwd()
    with opened_spec(package.reference) as spec:
        assert spec.data.tables == {"parcels": "parcels.parquet"}
        assert Path("parcels.parquet").is_file()
        assert sent_spec(package.reference, spec) == package.reference
    assert Path.cwd() == before


def test_stages_get_a_package_of_what_the_parent_has_read(plain: Path) -> None:
    with opened_spec(str(plain)) as spec:
        reference = sent_spec(str(plain), spec)
    plain.write_text("name: edited-in-the-meantime")
    assert tables(reference) == {"parcels": str(plain.parent / "parcels.parquet")}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/no/such/spec.yaml", r"no such file on .*, where the run is; .*`serin run SPEC`"),
        ("s3://{bucket}/none.yaml", r"cannot be read on .*there is no such object; .*`serin run SPEC`"),
        ("ftp9://host/spec.yaml", r"cannot be read on .*ftp9.*; .*`serin run SPEC`"),
        (f"package:{'0' * 64}", r"there is none; sender and workers must have the same SERIN_STORE"),
        ("package:../../etc", r"not a valid package name"),
        ({"name": "x"}, r"spec: \d+ problem"),
    ],
)
def test_a_wrong_one_is_refused_with_what_where_and_what_to_do(
    source: object, words: str, bucket: str, home: Path
) -> None:
    if isinstance(source, str):
        source = source.replace("s3://{bucket}", bucket)
    with pytest.raises(SerinError, match=words):
        tables(source)


def test_relative_paths_without_a_folder_are_refused_by_their_keys(tmp_path: Path, home: Path) -> None:
    document = yaml.safe_load(write_project(tmp_path / "project", rows=50).read_text())
    document["features"][0]["steps"].pop()
    with pytest.raises(
        SpecError, match=r"(?s)data\.tables\.parcels: parcels\.parquet is relative.*model\.module"
    ):
        tables(document)


def test_a_relative_lock_without_a_folder_is_refused(plain: Path, bucket: str) -> None:
    document = {**yaml.safe_load(plain.read_text()), "environment": {"lock": "uv.lock"}}
    with pytest.raises(
        SpecError, match=r"environment\.lock: uv\.lock is relative, and a spec without a file"
    ):
        tables(document)
    system, path = file_system(f"{bucket}/spec.yaml")
    system.pipe_file(path, yaml.safe_dump(document).encode())
    with pytest.raises(
        SpecError, match=r"environment\.lock: uv\.lock is not fetched from a URL; send it with"
    ):
        tables(f"{bucket}/spec.yaml")


def test_code_at_a_url_is_refused(tmp_path: Path, bucket: str, home: Path) -> None:
    document = yaml.safe_load(write_project(tmp_path / "project", rows=50).read_text())
    document["features"][0]["steps"].pop()
    system, path = file_system(f"{bucket}/spec.yaml")
    system.pipe_file(path, yaml.safe_dump(document).encode())
    with pytest.raises(
        SpecError, match=r"model\.module: net\.py is not fetched from a URL; send it with `serin run"
    ):
        tables(f"{bucket}/spec.yaml")


def test_a_package_comes_back_as_a_folder_that_can_be_run(plain: Path, tmp_path: Path) -> None:
    package = pack_spec(read_spec(plain), elsewhere=True)
    package.send()
    folder = copy_package(package.reference, tmp_path / "back")
    assert pack_spec(read_spec(folder), elsewhere=True).reference == package.reference
    with pytest.raises(SpecError, match="is there already"):
        copy_package(package.reference, folder)
    with pytest.raises(PackageRefused):
        copy_package(f"package:{'0' * 64}", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["../evil", "Flights", 7, None])
def test_a_package_that_does_not_name_a_model_is_copied_to_a_folder_called_like_its_digest(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, name: object
) -> None:
    """The name in a package is anybody's: it must not lead out of the working folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for given, expected in ((name, "{}"), ("flights", "flights-{}")):
        contents = {"spec.yaml": yaml.safe_dump({"name": given}).encode()}
        publish_package(Store.open(), contents)
        digest = manifest_of(contents).digest
        assert str(copy_package(f"package:{digest}")) == expected.format(digest[:12])


def test_what_travelled_with_a_run_is_refused_on_a_dask_scheduler_that_does_not_see_it(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers have other disks, and may have another module of that name."""
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    monkeypatch.setattr(dask_engine, "CONNECT_S", 0.2)  # nothing answers there
    path = write_project(tmp_path / "project", rows=50)
    document = {**yaml.safe_load(path.read_text()), "etl": {"engine": "tcp://127.0.0.1:9"}}
    path.write_text(yaml.safe_dump(document))
    package = pack_spec(read_spec(path), elsewhere=True)
    package.send()
    with (
        opened_spec(package.reference) as spec,
        pytest.raises(
            SpecError, match=r"etl\.engine: .*parcels\.parquet, ours\.steps:Squash .*`serin tables push"
        ),
    ):
        run_etl(spec)
    document["data"]["tables"] = {"parcels": str(path.parent / "parcels.parquet")}
    document["features"][0]["steps"].pop()
    path.write_text(yaml.safe_dump(document))
    seen_by_all = pack_spec(read_spec(path), elsewhere=False)
    seen_by_all.send()
    with (
        opened_spec(seen_by_all.reference) as spec,
        pytest.raises(EngineFailed, match="no scheduler answers"),
    ):
        run_etl(spec)
